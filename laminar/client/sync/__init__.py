"""The client for programs without an event loop.

Begin with `client`; every module has the shape of its asynchronous twin, and `portal` runs the loop.
"""
