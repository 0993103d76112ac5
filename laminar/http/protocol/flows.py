"""A flow: all requests of one client, whatever connections they come on, as a server shares its turns."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

TURN: Final = 4
"""Most requests of a flow that are begun in one turn of the loop. A large body counts as several."""

REQUEST: Final = 8
"""What a request counts, in answers that were waited for: making and sending these costs about as much."""

ALONE: Final = 64
"""The same while no other flow has a connection."""


class Waiting(Protocol):
    """What waits for a turn: a connection with its next request, or with answers that could be sent."""

    def take_turn(self) -> None:
        """Go on, as long as the flow has a share of this turn left."""
        ...


class Flow:
    """What a flow has left of the present turn, in answers; its open connections; and what waits for a turn.

    A server makes none: its application says to which flow a connection belongs.
    """

    __slots__ = ("connections", "is_spent", "left", "waiting")

    def __init__(self) -> None:
        self.left = TURN * REQUEST
        self.is_spent = False
        self.connections = 0
        self.waiting: deque[Waiting] = deque()
