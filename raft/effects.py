"""What a core wants done, gathered until the driver takes it.

The parts of the core (following, leading, elections) share one of these and the identity that every message
of ours carries; so none of them needs to know the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from raft.messages import AnyMessage
from raft.values import SendAppend


class Identity(msgspec.Struct, frozen=True):
    """Who speaks: what stands in the head of each message."""

    cluster: bytes
    group: bytes
    replica_id: int
    incarnation: int


class Effects:
    """The parts of the next Ready that are not the log's or the hard state's."""

    __slots__ = ("after_sync", "appends", "messages", "reads", "reads_failed")

    messages: list[AnyMessage]
    after_sync: list[AnyMessage]
    appends: list[SendAppend]
    reads: list[tuple[int, int]]
    reads_failed: list[int]

    def __init__(self) -> None:
        self.messages = []
        self.after_sync = []
        self.appends = []
        self.reads = []
        self.reads_failed = []

    def hand_out(
        self,
    ) -> tuple[
        Sequence[AnyMessage],
        Sequence[AnyMessage],
        Sequence[SendAppend],
        Sequence[tuple[int, int]],
        Sequence[int],
    ]:
        """All of it, in the order of the fields of `Ready`; nothing is left here."""
        messages: Sequence[AnyMessage] = ()
        after_sync: Sequence[AnyMessage] = ()
        appends: Sequence[SendAppend] = ()
        reads: Sequence[tuple[int, int]] = ()
        reads_failed: Sequence[int] = ()
        # A list that has nothing in it stays here: most Readies carry one or two kinds of effects.
        if self.messages:
            messages, self.messages = self.messages, []
        if self.after_sync:
            after_sync, self.after_sync = self.after_sync, []
        if self.appends:
            appends, self.appends = self.appends, []
        if self.reads:
            reads, self.reads = self.reads, []
        if self.reads_failed:
            reads_failed, self.reads_failed = self.reads_failed, []
        return messages, after_sync, appends, reads, reads_failed
