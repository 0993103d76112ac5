"""A principal: the name under which a request is made, with its grants, and the refusal of all else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from laminar.http.api.problems import Problem
from laminar.http.api.roles import SYSTEM_PREFIX, AnyGrant, What, allows, prefixes
from laminar.http.protocol.messages import Request
from laminar.node.access.meters import Meter
from membership.records import CredentialRecord, Grant

ANONYMOUS: Final = "anonymous"
"""The principal's name where a node asks for none."""

CHALLENGE: Final = ("WWW-Authenticate", "Bearer")

_NO_GRANTS: Final[tuple[Grant, ...]] = ()


@dataclass(frozen=True, slots=True)
class Principal:
    """A principal as one credential proves it."""

    name: str
    grants: Sequence[AnyGrant] = _NO_GRANTS
    expires_ms: int = 0
    """When the credential ends; 0: never."""
    credential: str = ""
    """The id of the credential; empty: none."""
    found_in: Mapping[str, CredentialRecord] | None = None
    """The credentials among which this one was found; None: none was looked up."""
    meter: Meter | None = field(default=None, compare=False)
    """What it uses of this shard; None where nothing is limited."""

    def may(self, what: What, name: str) -> bool:
        """Return whether the grants allow `what` on a name; the empty name is everything."""
        return allows(self.grants, what, name)

    def stands(self, credentials: Mapping[str, CredentialRecord], *, now_ms: int) -> bool:
        """Return whether the credential is among these and has not ended: for a request that goes on long."""
        if not self.credential:
            return True
        return self.credential in credentials and (not self.expires_ms or now_ms < self.expires_ms)

    def prefixes(self, what: What, *, within: str) -> list[str]:
        """Return the prefixes of the names below `within` on which the grants allow `what`, if `may` does."""
        return prefixes(self.grants, what, within=within)

    def among(self, names: Iterable[str], what: What, *, within: str) -> Iterator[str]:
        """Yield the names below `within` on which the grants allow `what`.

        Of many, as all topics are, it takes far less time than to ask `may` of each.
        """
        beginnings = tuple(self.prefixes(what, within=within))
        systems = self.may(what, SYSTEM_PREFIX)
        for name in names:
            if name.startswith(beginnings) and (systems or not name.startswith(SYSTEM_PREFIX)):
                yield name

    def require(self, what: What, name: str) -> None:
        """Refuse what the grants do not allow.

        Raises:
            Problem: 403 `forbidden`. It says nothing about whether anything of that name exists.
        """
        if not self.may(what, name):
            if name.startswith(SYSTEM_PREFIX):
                raise forbidden("admin", "")  # no other role helps
            raise forbidden(what, name)


ANYONE: Final = Principal(ANONYMOUS, (Grant("admin", ""),))
"""Every client of a node that asks for no principal."""

UNPROVEN: Final = Principal(ANONYMOUS)
"""A client of a node that asks for principals, on a route that needs none."""


def forbidden(what: What, name: str) -> Problem:
    """Return the problem of a principal that lacks a role on a name; the empty name is everything."""
    role = "read" if what == "describe" else what
    detail = f"the role {role} is needed on {name!r}" if name else f"the role {role} is needed on everything"
    return Problem("forbidden", detail, field="role", value=role, limit=name, outcome="not_applied")


def unauthorized(detail: str) -> Problem:
    """Return the problem of a request without a principal."""
    return Problem("unauthorized", detail, field="authorization", headers=[CHALLENGE], outcome="not_applied")


def principal_of(request: Request) -> Principal:
    """Return the principal of a request that its node has let in (`laminar.node.api.app`)."""
    memo = request.head.memo
    principal: Principal | None = None if memo is None else memo.principal
    if principal is None:
        principal = request.connection.context  # by a certificate, or by nothing
    return ANYONE if principal is None else principal


def owner_of(request: Request) -> str:
    """Return whose limits count what a request makes; empty where that is no one's.

    A node that asks for no principal counts for no one. Nor does what a node does itself, as the audit: its
    name is in parentheses, as no token's is, and the limits of `*` are not meant for it.
    """
    name = principal_of(request).name
    return "" if name == ANONYMOUS or name.startswith("(") else name
