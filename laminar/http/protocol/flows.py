"""A flow: all requests of one client over all its connections. Flows share the turns of a server's loop."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

TURN: Final = 4
"""Most requests of a flow that are begun in one turn of the loop. A large body counts as several."""

REQUEST: Final = 8
"""What a request counts, in answers that were waited for: making and sending these costs about as much."""

REFUSED_TURN: Final = 1
"""The same of a flow that is at its limit, as long as one of its connections is muted."""

ALONE: Final = 64
"""The same while no other flow has a connection, and of one read where there are no flows."""

# Each 64 KiB of a body count like a further request. As a shift.
REQUEST_SHIFT: Final = 16


class Waiting(Protocol):
    """A connection that waits for a turn, with its next request or with answers that could be sent."""

    def take_turn(self) -> None:
        """Continue while the flow has a share of this turn left."""
        ...


class Flow:
    """A flow: its share left of the present turn (in answers), its connections, and those that wait.

    Once it has no more than `renewed_at` left, it `is_due`: the next turn fills up its share.
    `muted` are those of its connections on which no request begins for a while, because the flow was over its
    limit; `reads` counts its reads on its own connections that have begun and have no answer yet. A server
    makes none: its application says to which flow a connection belongs. `passed` are its requests in progress
    that came on no connection of its own, `woken` those of them that have their turn and have not gone on
    yet.
    """

    __slots__ = (
        "are_strangers",
        "connections",
        "is_due",
        "is_spent",
        "left",
        "muted",
        "passed",
        "reads",
        "renewed_at",
        "waiting",
        "woken",
    )

    def __init__(self, *, are_strangers: bool = False) -> None:
        """Make a flow without connections.

        Connections of strangers (clients without a principal) are closed first when there are too many.
        """
        self.are_strangers = are_strangers
        self.left = TURN * REQUEST
        self.renewed_at = 0
        self.is_due = False
        self.is_spent = False
        self.connections = 0
        self.muted = 0
        self.passed = 0
        self.reads = 0
        self.woken = 0
        self.waiting: deque[Waiting] = deque()

    @property
    def is_used(self) -> bool:
        """Whether the flow has a connection or a request here."""
        return bool(self.connections or self.passed or self.waiting)


class Turns(Protocol):
    """The turns of a server, for requests that come on no connection of their flow (forwarded ones)."""

    def enter(self, flow: Flow) -> None:
        """Count one more such request of a flow."""
        ...

    def exit(self, flow: Flow) -> None:
        """Count one such request less."""
        ...

    async def turn(self, flow: Flow, cost: int) -> None:
        """Wait until the flow has a share of a turn left, and take `cost` (in answers) from it."""
        ...
