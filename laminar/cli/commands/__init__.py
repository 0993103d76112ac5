"""The commands: a module for each family, imported when one of its commands is called.

`laminar.cli.app` has the table of them. Begin with `topic`.
"""
