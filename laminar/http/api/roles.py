"""The roles that a principal may have, and which of them a route needs (docs/security.md).

A grant gives a role on all names that begin with its prefix. Names are those of topics; sinks and named
producers belong to no topic, and their names count as if they were a topic's. This module knows the rules of
roles, not who has which.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, Protocol

Role = Literal["read", "write", "admin", "metrics"]
What = Literal["public", "any", "describe", "read", "write", "admin", "metrics"]

ROLES: Final[tuple[Role, ...]] = ("read", "write", "admin", "metrics")

SYSTEM_PREFIX: Final = "_"
"""Names that begin so belong to the system: only an admin of everything has a role on them."""

AFTER_SYSTEM: Final = "_~"
"""A text that sorts after all names of the system, and is none itself."""

# By what a route needs: the roles that give it. An admin has all, also those on which nothing depends yet.
_GIVEN_BY: Final[dict[What, frozenset[str]]] = {
    "describe": frozenset(("read", "write", "admin")),
    "read": frozenset(("read", "admin")),
    "write": frozenset(("write", "admin")),
    "admin": frozenset(("admin",)),
    "metrics": frozenset(("metrics", "admin")),
}


class Needs(NamedTuple):
    """The permission that a client needs to use a route.

    It is the role `what` on the names that the path or query parameters `named_by` have; without parameters
    it is needed on every name, that is on the empty prefix. `what` may also be `public`, which needs no
    principal, `any`, which needs a principal and no role, or `describe`, which needs one of several roles.
    """

    what: What
    named_by: tuple[str, ...] = ()


PUBLIC: Final = Needs("public")
ANY: Final = Needs("any")
DESCRIBE: Final = Needs("describe", ("topic",))
READ: Final = Needs("read", ("topic",))
WRITE: Final = Needs("write", ("topic",))
ADMIN: Final = Needs("admin", ("topic",))
WRITE_SINK: Final = Needs("write", ("sink",))
WRITE_STAGE: Final = Needs("write", ("sink", "topic"))
ADMIN_OF_ALL: Final = Needs("admin")
METRICS: Final = Needs("metrics")


class AnyGrant(Protocol):
    """The interface of a grant: a role on every name that begins with a prefix."""

    @property
    def role(self) -> str:
        """The role: one of `ROLES`."""

    @property
    def prefix(self) -> str:
        """The beginning of the names to which the grant applies; empty: all names."""


def allows(grants: Iterable[AnyGrant], what: What, name: str) -> bool:
    """Return whether one of `grants` allows `what` (see `Needs`) on `name`; the empty name means all names.

    Names of the system (with `SYSTEM_PREFIX`) need the role admin on all names.
    """
    system = name.startswith(SYSTEM_PREFIX)
    given_by = _GIVEN_BY["admin" if system else what]
    if system:
        name = ""
    return any(grant.role in given_by and name.startswith(grant.prefix) for grant in grants)


def prefixes(grants: Iterable[AnyGrant], what: What, *, within: str) -> list[str]:
    """Return the prefixes of the names on which `grants` allow `what`, for the list of those names.

    Only names that begin with `within` are wanted, so every prefix does; no prefix begins with another one.
    Names of the system may begin with a prefix: `allows` decides about them.
    """
    found: list[str] = []
    for each in sorted(grant.prefix for grant in grants if grant.role in _GIVEN_BY[what]):
        narrowed = each if each.startswith(within) else within
        overlap = within.startswith(each) or each.startswith(within)
        if overlap and not any(narrowed.startswith(known) for known in found):
            found.append(narrowed)
    return found
