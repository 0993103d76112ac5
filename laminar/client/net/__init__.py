"""The way of a request to a node: the endpoints, the pool of connections, and the retries.

Begin with `session`.
"""
