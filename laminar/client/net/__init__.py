"""HTTP requests of a client: the nodes to ask, the pool of connections, and the retries.

Begin with `session`.
"""
