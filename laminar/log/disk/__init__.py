"""All access to the disk, and what its users share: errors, limits on open files, threads.

Begin with `disk`; no other module of the log may open a file.
"""
