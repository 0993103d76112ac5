"""How a request reaches a node: the endpoints, the pool of connections, and the retries.

Begin with `session`.
"""
