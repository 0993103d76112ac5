"""The HTTP API of Laminar: its routes, its errors (*problems*, RFC 9457), and the formats of its bodies.

Begin with the two tables, `routes` and `problems`. `append_body` reads the bodies of appends, `fetch_body`
writes those of fetches.
"""
