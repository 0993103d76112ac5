"""Tools for the command line: reports on a folder of logs, and the rebuilding of its indexes.

Begin with `folder_scan`. Nothing here changes a batch.
"""
