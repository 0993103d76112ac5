"""Flows: the requests of each client, by which a server shares the time of its event loop.

A flow is all requests of one client (of one principal) over all its connections. In a *turn* of the loop a
flow may begin a limited number of requests and get a limited number of answers; the rest waits for the next
turn (`laminar.http.server.turns`).
"""

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
    """A connection, or a forwarded request, that waits for the next turn of its flow."""

    def take_turn(self) -> None:
        """Begin the waiting requests, or send the waiting answers, up to the flow's share of this turn."""
        ...


class Flow:
    """All requests of one client, and the client's share of the present turn of the loop.

    The application creates flows, and says to which flow a connection belongs; the server creates none.
    `left` is what remains of the share in this turn, counted in answers. When it falls to `renewed_at`, the
    flow `is_due`: the next turn fills up its share. The flow `is_spent` when nothing is left. `waiting` holds
    what waits for the next turn. `connections` is the number of the flow's connections; `muted` is the number
    of those that begin no request for a while, because the client exceeded its rate limit. `reads` is the
    number of its reads on these connections that have begun and have no answer yet. `passed` is the number of
    its requests in progress that another shard forwarded, so that they came on a connection of another flow;
    `woken` is the number of those whose turn has come but that have not continued yet.
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

        `are_strangers` is set for the flow of clients that have not proved a principal. If there are too many
        connections, those of strangers are closed first.
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
        """Whether the flow has a connection or a request on this server; an unused one may be dropped."""
        return bool(self.connections or self.passed or self.waiting)


class Turns(Protocol):
    """The turns of a server's loop, as forwarded requests wait for them.

    Such a request comes on the connection of another shard, and not on one of its own flow.
    """

    def enter(self, flow: Flow) -> None:
        """Count a forwarded request of `flow` as in progress."""
        ...

    def exit(self, flow: Flow) -> None:
        """Count a forwarded request of `flow` as ended."""
        ...

    async def turn(self, flow: Flow, cost: int) -> None:
        """Wait until `flow` may continue in a turn; take `cost` (in answers) from its share of that turn."""
        ...
