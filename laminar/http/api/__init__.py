"""Laminar's own part of HTTP: the routes, the problems, and what the bodies mean.

Begin with `routes` and `problems`, the two tables; `append_body` reads bodies, `fetch_body` writes them.
"""
