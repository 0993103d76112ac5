"""Messages and calls between the processes of a cluster: connections, greetings, frames.

Begin with `transport`.
"""
