"""The HTTP server of one event loop: which bytes are a request, and when its answer leaves.

Begin with `server`. `reader` and `writer` are the two halves of one connection.
"""
