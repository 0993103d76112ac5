"""The files of a segment: frames and their index, found at a start and rebuilt when damaged.

Begin with `segment`, the loop's view; `segment_file` is the files.
"""
