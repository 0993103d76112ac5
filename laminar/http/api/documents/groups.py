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
    """Request to renew a member's session in its consumer group.

    The session ends `session_ms` after its last renewal; then the member is not in the group any more.
    """

    mode: Literal["clustering", "broadcast"] = "clustering"
    session_ms: Annotated[int, Meta(ge=SHORTEST_SESSION_MS, le=LONGEST_SESSION_MS)] = 6_000
    routes: bool = False
    """Whether the member supports changes of the topic's route: it reads the partitions in their order."""


class MemberState(msgspec.Struct, frozen=True):
    """A live member of a consumer group; `seen_ms_ago` is the time since its last renewal."""

    member: Annotated[str, Meta(pattern=f"^{GROUP_PATTERN}$")]
    mode: str
    session_ms: int
    seen_ms_ago: Count


class Group(Answer):
    """A consumer group: its live members and its cursors.

    `forming` tells that the leader that answers is new, so that members may be missing which have not renewed
    their sessions with it yet.
    """

    topic: str
    group: str
    mode: str | None
    forming: bool
    members: list[MemberState]
    cursors: list[Cursor]


class RenewedMember(Answer):
    """The answer to a renewal: the member's session, all live members, and the version of the route."""

    topic: str
    group: str
    member: str
    mode: str
    session_ms: int
    forming: bool
    members: list[MemberState]
    route: Count
