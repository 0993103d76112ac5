"""The only way to the disk, and what everybody who uses it shares: errors, open files, threads.

Begin with `disk`; no other module of the log may open a file.
"""
