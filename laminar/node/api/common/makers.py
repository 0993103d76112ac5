"""Who makes what a partition keeps, with the limit that its leader goes by."""

from __future__ import annotations

from laminar.node.partition.problems import NO_MAKER, Maker
from laminar.node.runtime.cluster_view import View
from membership.catalog_rules import LIMITS_SINCE


def maker_of(view: View, principal: str, limit: str) -> Maker:
    """Return the maker of something that counts for this limit of a principal; an empty name: no one.

    No one either before all nodes keep in their logs who made what.
    """
    if not principal or view.code_version < LIMITS_SINCE:
        return NO_MAKER
    return Maker(principal, view.limit(principal, limit))
