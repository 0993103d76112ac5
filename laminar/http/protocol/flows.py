"""A flow: all requests of one client, whatever connections they come on, as a server shares its turns."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

TURN: Final = 4
"""Most requests of a flow that are begun in one turn of the loop. A large body counts as several."""

ALONE: Final = 64
"""The same while no other flow has a connection."""


class Waiting(Protocol):
    """A connection whose next request waits for a turn."""

    def take_turn(self) -> None:
        """Begin requests that have come, as long as the flow has a share of this turn left."""
        ...


class Flow:
    """What a flow has of the present turn, its open connections, and those of them that wait for a turn.

    A server makes none: its application says to which flow a connection belongs.
    """

    __slots__ = ("connections", "is_spent", "left", "waiting")

    def __init__(self) -> None:
        self.left = TURN
        self.is_spent = False
        self.connections = 0
        self.waiting: deque[Waiting] = deque()
