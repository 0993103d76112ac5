"""The key index of a sealed segment: where in it records with a key, a trace id or a header's value may be.

A hint beside the segment, like its index: without it the segment is scanned. `layout` has the bytes,
`writer` makes a file, `lookup` reads it. What is hashed is the caller's.
"""
