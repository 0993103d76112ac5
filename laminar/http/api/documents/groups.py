"""Documents of consumer groups and their members."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from laminar.http.api.documents.cursors import Cursor
from laminar.http.api.documents.shared import Answer, Count, Request
from laminar.http.api.parameters import GROUP_PATTERN

SHORTEST_SESSION_MS: Final = 2_000
LONGEST_SESSION_MS: Final = 60_000


class Renewal(Request):
    """Request to renew a member's session in its group."""

    mode: Literal["clustering", "broadcast"] = "clustering"
    session_ms: Annotated[int, Meta(ge=SHORTEST_SESSION_MS, le=LONGEST_SESSION_MS)] = 6_000
    routes: bool = False
    """Whether the member goes over changes of the topic's route."""


class MemberState(msgspec.Struct, frozen=True):
    """A live member of a group."""

    member: Annotated[str, Meta(pattern=f"^{GROUP_PATTERN}$")]
    mode: str
    session_ms: int
    seen_ms_ago: Count


class Group(Answer):
    """A consumer group: its live members and its cursors."""

    topic: str
    group: str
    mode: str | None
    forming: bool
    members: list[MemberState]
    cursors: list[Cursor]


class RenewedMember(Answer):
    """A member whose session was renewed, and all live members."""

    topic: str
    group: str
    member: str
    mode: str
    session_ms: int
    forming: bool
    members: list[MemberState]
    route: Count
