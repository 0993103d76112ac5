"""The client's side of HTTP: connections with pipelined requests, their source ports, and TLS.

Begin with `connection`.
"""
