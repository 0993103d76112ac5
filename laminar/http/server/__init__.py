"""The HTTP server of one event loop: it reads requests, shares the loop among clients, and writes answers.

Begin with `server`. `reader` and `writer` are the two halves of one connection.
"""
