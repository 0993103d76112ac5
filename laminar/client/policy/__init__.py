"""The client's decisions as pure functions: when to retry, where to send, whom to assign what.

Begin with `retry` and `routing`. Nothing here has a clock, a socket or a thread.
"""
