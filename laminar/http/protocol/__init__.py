"""HTTP/1.1 as values: heads, bodies, content codings and time limits, without a socket.

Begin with `request_head` and `messages`.
"""
