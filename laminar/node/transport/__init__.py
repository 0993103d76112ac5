"""Messages and calls between the processes of a cluster: connections, handshakes, frames.

Begin with `transport`.
"""
