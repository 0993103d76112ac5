"""The open records of channels: those that are out or aside, and how they are read, listed and copied.

Begin with `jobs`, which reads them.
"""
