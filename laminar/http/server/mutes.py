"""Muted connections: the server begins no request of them for a while.

A connection is muted if its client exceeds its rate limit and goes on sending in spite of the refusal. The
muted connections of a flow (all requests of one client) are unmuted one at a time, in the order in which they
were refused, and at least `GAP_S` apart. Each then has the requests carried out that the rate allows by then,
gets one more refusal, and is muted again. If many were unmuted at once, they would delay all other clients,
and a client could use more of the loop's time by opening more connections.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from laminar.http.protocol.flows import Flow

GAP_S: Final = 0.002
"""How long after one connection of a flow the next one goes on, at least."""

LONGEST_S: Final = 1.0
"""Longest pause of one connection: limits may be raised or removed, or its client may have gone."""

# A timer of the loop has whole milliseconds: it may come that much before its time.
_ROUNDING_S: Final = 0.001


class Muted(Protocol):
    """A connection that can be muted (that begins no request for a while)."""

    def unmute(self) -> None:
        """Begin requests again, first those that arrived while the connection was muted."""
        ...


class _Line:
    """The muted connections of one flow, in the order of their refusals, and when each may be unmuted."""

    __slots__ = ("free_s", "pauses", "timer")

    def __init__(self) -> None:
        self.pauses: dict[Muted, float] = {}
        self.free_s = 0.0  # none goes on before
        self.timer: asyncio.TimerHandle | None = None


class Mutes:
    """The muted connections of one server, by their flows."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: dict[Flow, _Line] = {}

    def mute(self, flow: Flow, connection: Muted, wait_s: float) -> None:
        """Count a connection of `flow` as muted, and call its `unmute` after `wait_s` seconds or later.

        If `wait_s` is above `LONGEST_S`, that is used.
        """
        line = self._lines.get(flow)
        if line is None:
            line = self._lines[flow] = _Line()
        until_s = asyncio.get_running_loop().time() + min(wait_s, LONGEST_S)
        assert connection not in line.pauses, "a connection that is muted began a request"
        line.pauses[connection] = until_s
        flow.muted = len(line.pauses)
        if line.timer is None:
            self._await_first(flow, line)

    def drop(self, flow: Flow, connection: Muted) -> None:
        """Remove a connection from the muted ones, because it has ended or begins requests again."""
        pauses = self._lines[flow].pauses
        del pauses[connection]
        flow.muted = len(pauses)

    def _await_first(self, flow: Flow, line: _Line) -> None:
        until_s = next(iter(line.pauses.values()))
        loop = asyncio.get_running_loop()
        line.timer = loop.call_at(max(until_s, line.free_s), self._wake_first, flow, line)

    def _wake_first(self, flow: Flow, line: _Line) -> None:
        """Unmute the first connection of the flow, if its time has come; then set the timer for the next."""
        line.timer = None
        try:
            now_s = asyncio.get_running_loop().time()
            connection, until_s = next(iter(line.pauses.items()), (None, 0.0))
            if connection is not None and until_s <= now_s + _ROUNDING_S:
                line.free_s = now_s + GAP_S
                connection.unmute()  # drops it, and may mute it once more
        finally:
            if not line.pauses:
                del self._lines[flow]
            elif line.timer is None:
                self._await_first(flow, line)
