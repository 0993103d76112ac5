"""The maker of an object in a partition (a cursor, a sink): a principal, and how many it may have."""

from __future__ import annotations

from laminar.node.partition.problems import NO_MAKER, Maker
from laminar.node.runtime.cluster_view import View
from membership.limit_rules import LIMITS_SINCE


def maker_of(view: View, principal: str, limit: str) -> Maker:
    """Return a principal with its value of a limit, for an object that it creates in a partition.

    Returns `NO_MAKER`, whom no limit restricts, for an empty name, and while a node is too old to record
    makers.
    """
    if not principal or view.code_version < LIMITS_SINCE:
        return NO_MAKER
    return Maker(principal, view.limit(principal, limit))
