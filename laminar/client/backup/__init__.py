"""Backups of topics: the export of a topic to a folder, and its import from there (docs/backup.md).

This module imports nothing; import `export` or `restore` of this package.
"""
