"""The client of Laminar's HTTP interface, for programs with an event loop and without one.

`laminar.aio` and `laminar` re-export what programs use: the asynchronous classes, and the synchronous ones
that call them. Decisions without I/O are in `policy`. Nothing is imported here, so that a module of `policy`
can be imported without the rest of the client.
"""
