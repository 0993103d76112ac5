"""The key index of a sealed segment: the batches that may have records with a key, trace id or header value.

It is a file beside the segment that makes searches faster: without it the segment is scanned. `layout` has
the bytes, `writer` makes a file, `lookup` reads it. The caller decides which values are hashed.
"""
