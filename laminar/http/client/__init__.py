"""The client's side of HTTP: one connection with pipelined requests, and its source port.

Begin with `connection`.
"""
