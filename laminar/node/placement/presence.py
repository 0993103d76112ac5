"""The presence of each node: the time for which it has been seen, or not seen, without a break.

A node is *gone* when it has been absent for long, *settled* when it has been present for a while. One that
comes and goes is neither, so it loses no replica and gets none. The catalog's leader measures with its own
monotonic clock; a new leader begins at zero, so nothing moves for a while after an election.
"""

from __future__ import annotations

from collections.abc import Iterable


class Presence:
    """Since when each node has been present or absent without a break, in ms of the monotonic clock."""

    def __init__(self) -> None:
        self._absent_since_ms: dict[str, int] = {}
        self._present_since_ms: dict[str, int] = {}

    def observe(self, nodes: Iterable[str], *, absent: Iterable[str], now_ms: int) -> None:
        """Record that of `nodes` those in `absent` are not seen now, and that all others are."""
        gone = set(absent)
        self._absent_since_ms = {node: self._absent_since_ms.get(node, now_ms) for node in gone}
        self._present_since_ms = {
            node: self._present_since_ms.get(node, now_ms) for node in nodes if node not in gone
        }

    def present(self) -> set[str]:
        """Return the nodes that were seen at the last observation."""
        return set(self._present_since_ms)

    def gone(self, ms: int, *, now_ms: int) -> set[str]:
        """Return the nodes that have been absent for `ms` or longer; none if `ms` is 0."""
        return {node for node, since_ms in self._absent_since_ms.items() if ms and now_ms - since_ms >= ms}

    def settled(self, ms: int, *, now_ms: int) -> set[str]:
        """Return the nodes that have been present for `ms` or longer."""
        return {node for node, since_ms in self._present_since_ms.items() if now_ms - since_ms >= ms}

    def forget(self) -> None:
        """Clear all times: another node leads the catalog now, and this one no longer observes the nodes."""
        self._absent_since_ms, self._present_since_ms = {}, {}
