"""Backups of topics: a topic is exported to a folder, and a topic is made again from one (docs/backup.md).

This module imports nothing; import `export` or `restore` of this package.
"""
