"""The only way to the disk, and what its users share: errors, open files, threads.

Begin with `disk`; no other module of the log may open a file.
"""
