"""The table of routes: all rows, in the order of the page `/docs`.

Each operation has one row, except `docs`, which has two paths.
"""

from __future__ import annotations

from typing import Final

from laminar.http.api.routes import (
    administration,
    cluster,
    consumers,
    records,
    server,
    topics,
    transactions,
)

ROUTES: Final = (
    *topics.ROUTES,
    *records.ROUTES,
    *consumers.ROUTES,
    *transactions.ROUTES,
    *cluster.ROUTES,
    *administration.ROUTES,
    *server.ROUTES,
)
NEEDS: Final = {route.operation: route.needs for route in ROUTES}
BODIES: Final = {route.operation: route.body for route in ROUTES}
