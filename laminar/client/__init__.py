"""The client of Laminar's HTTP interface: pure decisions under an async face and a sync one.

`laminar.aio` and `laminar` re-export what programs use. Nothing is imported here, so that a
pure module below can be had without the rest.
"""
