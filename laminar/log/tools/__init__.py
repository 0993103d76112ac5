"""Reports on a folder of logs, and rebuilt indexes, for a person at the command line.

Begin with `folder_scan`. Nothing here changes a batch.
"""
