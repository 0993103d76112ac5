"""A principal: the name under which a request is made, with its grants; and the refusals without one."""

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
"""The name of every client's principal on a node without access control."""

CHALLENGE: Final = ("WWW-Authenticate", "Bearer")

_NO_GRANTS: Final[tuple[Grant, ...]] = ()


@dataclass(frozen=True, slots=True)
class Principal:
    """The name under which a request is made, with the grants of the credential that proves it."""

    name: str
    grants: Sequence[AnyGrant] = _NO_GRANTS
    expires_ms: int = 0
    """The time (ms) at which the credential expires; 0 if it does not."""
    credential: str = ""
    """The id of the credential; empty if there is none."""
    found_in: Mapping[str, CredentialRecord] | None = None
    """The table of credentials in which this one was found; None if none was looked up."""
    meter: Meter | None = field(default=None, compare=False)
    """The meter of what the principal uses of this shard; None if nothing is limited."""

    def may(self, what: What, name: str) -> bool:
        """Return whether the grants allow `what` on a name; the empty name is everything."""
        return allows(self.grants, what, name)

    def stands(self, credentials: Mapping[str, CredentialRecord], *, now_ms: int) -> bool:
        """Return whether the credential is still in `credentials` and not expired, for a long request."""
        if not self.credential:
            return True
        return self.credential in credentials and (not self.expires_ms or now_ms < self.expires_ms)

    def prefixes(self, what: What, *, within: str) -> list[str]:
        """Return the prefixes of names that begin with `within` and on which the grants allow `what`.

        `may` still has to be asked for each name.
        """
        return prefixes(self.grants, what, within=within)

    def among(self, names: Iterable[str], what: What, *, within: str) -> Iterator[str]:
        """Yield the names that begin with `within` and on which the grants allow `what`.

        For many names, like those of all topics, that is much faster than to ask `may` for each.
        """
        beginnings = tuple(self.prefixes(what, within=within))
        systems = self.may(what, SYSTEM_PREFIX)
        for name in names:
            if name.startswith(beginnings) and (systems or not name.startswith(SYSTEM_PREFIX)):
                yield name

    def require(self, what: What, name: str) -> None:
        """Raise unless the grants allow `what` on a name.

        Raises:
            Problem: 403 `forbidden`, which does not reveal whether the name exists.
        """
        if not self.may(what, name):
            if name.startswith(SYSTEM_PREFIX):
                raise forbidden("admin", "")  # no other role helps
            raise forbidden(what, name)


ANYONE: Final = Principal(ANONYMOUS, (Grant("admin", ""),))
"""Every client of a node without access control."""

UNPROVEN: Final = Principal(ANONYMOUS)
"""A client without credential, on a public route of a node with access control."""


def forbidden(what: What, name: str) -> Problem:
    """Return the problem of a principal that lacks a role on a name; the empty name is everything."""
    role = "read" if what == "describe" else what
    detail = f"the role {role} is needed on {name!r}" if name else f"the role {role} is needed on everything"
    return Problem("forbidden", detail, field="role", value=role, limit=name, outcome="not_applied")


def unauthorized(detail: str) -> Problem:
    """Return the problem of a request without a principal."""
    return Problem("unauthorized", detail, field="authorization", headers=[CHALLENGE], outcome="not_applied")


def principal_of(request: Request) -> Principal:
    """Return the principal of a request that was admitted (`laminar.node.api.admission`)."""
    memo = request.head.memo
    principal: Principal | None = None if memo is None else memo.principal
    if principal is None:
        principal = request.connection.context  # of a certificate, or anonymous
    return ANYONE if principal is None else principal


def owner_of(request: Request) -> str:
    """Return the principal whose limits apply to objects that a request creates; empty if there is none.

    There is none on a node without access control, and for appends of nodes themselves, like the audit's:
    their name is in parentheses, which no token's name can have, and the limits of `*` do not apply to them.
    """
    name = principal_of(request).name
    return "" if name == ANONYMOUS or name.startswith("(") else name
