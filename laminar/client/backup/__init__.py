"""Backups of topics: a topic is exported to a folder, and a topic is made again from one (docs/backup.md).

It imports nothing here; import `export` or `restore` of this package.
"""
