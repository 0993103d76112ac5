"""What leaves at the end of a turn: appends joined, commits told once, nothing reordered for a follower."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from laminar.batch import Buffer
from laminar.node.consensus.outbox import BULK_FRAME_BYTES, Outbox
from laminar.node.consensus.raft_frames import read_frame
from laminar.node.transport.transport import Channel, TcpAddress
from raft.messages import AnyMessage, Append, Heartbeat
from raft.values import SendAppend

B = 2
ADDRESS = TcpAddress("b", 1)
GROUP = b"g" * 16
HEAD = (b"c" * 16, GROUP, 1, B, 0, 5)


class Wire:
    """A transport that keeps what it is given, and a log whose entry k is k bytes of the digit k."""

    def __init__(self, size_bytes: int = 0) -> None:
        self.sent: list[tuple[Channel, AnyMessage, list[bytes]]] = []
        self.size_bytes = size_bytes
        self.turns = 0
        self.unsendable: list[bytes] = []
        # Entries are in memory; while it is clear, they are on a disk that does not answer.
        self.disk = asyncio.Event()
        self.disk.set()
        core = SimpleNamespace(term=5)
        replica: Any = SimpleNamespace(group=GROUP, nodes={B: "b"}, log=self, core=core, name="t/0@a")
        transport: Any = self
        self.replica = replica
        self.outbox = Outbox(
            transport,
            address_of=lambda node, of: ADDRESS,
            is_current=lambda of: True,
            turn=self._turn,
            on_unsendable=lambda group, error: self.unsendable.append(group),
        )

    def _turn(self) -> None:
        self.turns += 1

    def send(self, address: TcpAddress, channel: Channel, parts: Sequence[Buffer], *, at_once: bool) -> bool:
        for message, frames in read_frame(memoryview(b"".join(parts))):
            self.sent.append((channel, message, [bytes(frame) for frame in frames]))
        return True

    def read_nowait(self, first: int, last: int, *, max_bytes: int) -> list[bytes] | None:
        return self.entries(first, last) if self.disk.is_set() else None

    def entries(self, first: int, last: int) -> list[bytes]:
        return [b"%d" % index * (self.size_bytes or index) for index in range(first, last + 1)]

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[bytes]:
        await self.disk.wait()
        return self.entries(first, last)

    def append(self, first: int, last: int, *, commit: int = 0, term: int = 5, incarnation: int = 0) -> None:
        message = Append(*HEAD, first - 1, 4, commit, last - first + 1, 0, incarnation)
        message = msgspec.structs.replace(message, term=term)
        self.outbox.append(self.replica, SendAppend(message, first, last))

    def beat(self, commit: int, round_: int = 0) -> None:
        self.outbox.control(self.replica, Heartbeat(*HEAD, commit, round_))

    @property
    def appends(self) -> list[tuple[int, int, int, list[bytes]]]:
        """(entry before it, entries, commit, frames) of each append that left."""
        return [
            (message.prev_index, message.entry_count, message.commit, frames)
            for _, message, frames in self.sent
            if isinstance(message, Append)
        ]

    @property
    def beats(self) -> list[tuple[int, int]]:
        """(commit, round) of each heartbeat that left."""
        return [(m.commit, m.round) for _, m, _ in self.sent if isinstance(m, Heartbeat)]


async def test_appends_of_one_turn_that_follow_one_another_leave_as_one() -> None:
    """With the first one's place and the last one's commit: a follower then appends, syncs, answers once."""
    wire = Wire()
    wire.append(2, 2, commit=1)
    wire.append(3, 4, commit=2)
    wire.outbox.flush()
    wire.append(5, 5, commit=2)
    wire.outbox.flush()

    assert [(1, 3, 2, [b"22", b"333", b"4444"]), (4, 1, 2, [b"55555"])] == wire.appends


async def test_appends_that_do_not_go_on_stay_apart() -> None:
    """Sent again from earlier, of another term, to another life of the follower: each as it was made."""
    wire = Wire()
    wire.append(2, 3)
    wire.append(2, 2)
    wire.append(3, 3, term=6)
    wire.append(4, 4, term=6, incarnation=1)
    wire.outbox.flush()

    assert [(1, 2), (1, 1), (2, 1), (3, 1)] == [each[:2] for each in wire.appends]


async def test_a_joined_append_stays_within_a_frame() -> None:
    """Else it would have to wait behind megabytes at the follower."""
    wire = Wire(size_bytes=BULK_FRAME_BYTES // 2)
    for index in (2, 3, 4):
        wire.append(index, index)
    wire.outbox.flush()

    assert [(1, 2), (3, 1)] == [each[:2] for each in wire.appends]


async def test_a_probe_leaves_behind_the_entries_that_are_being_read() -> None:
    """It asks whether they came. Ahead of them it would be refused, and a leader with a slow disk would read
    and send everything again and again.
    """
    wire = Wire(size_bytes=BULK_FRAME_BYTES)
    wire.disk.clear()
    wire.append(2, 3)
    wire.append(4, 4)
    wire.append(5, 4)
    wire.outbox.flush()
    assert [] == wire.sent

    wire.disk.set()
    await asyncio.gather(*wire.outbox._tasks)
    wire.outbox.flush()
    wire.append(5, 4)
    wire.outbox.flush()

    assert [(1, 2), (3, 1), (4, 0)] == [each[:2] for each in wire.appends]
    assert [Channel.BULK] * 2 + [Channel.CONTROL] == [channel for channel, _, _ in wire.sent]


async def test_of_several_commits_the_last_is_told_and_soon() -> None:
    """Nothing more is proposed: the followers' readers must not wait for a heartbeat."""
    wire = Wire()
    wire.beat(6)
    wire.beat(7)
    wire.outbox.flush()
    before = wire.beats
    await asyncio.sleep(0)
    assert 1 == wire.turns
    wire.outbox.flush()
    wire.outbox.flush()

    assert ([], [(7, 0)]) == (before, wire.beats)


async def test_an_append_tells_the_commit_in_place_of_a_notice() -> None:
    """What was proposed by those who waited for the commit leaves in the same turn."""
    wire = Wire()
    wire.beat(7)
    await asyncio.sleep(0)
    wire.append(8, 8, commit=7)
    wire.outbox.flush()
    wire.outbox.flush()

    assert ([(7, 1, 7, [b"8" * 8])], []) == (wire.appends, wire.beats)


async def test_a_commit_that_comes_after_the_last_append_is_told_all_the_same() -> None:
    """That append was made before: it says less, and nothing else is proposed that would say it."""
    wire = Wire()
    wire.append(8, 8, commit=6)
    wire.beat(7)
    await asyncio.sleep(0)
    wire.outbox.flush()
    wire.outbox.flush()

    assert ([(7, 1, 6, [b"8" * 8])], [(7, 0)]) == (wire.appends, wire.beats)


async def test_a_notice_never_follows_a_heartbeat_that_says_more() -> None:
    """The heartbeat may let the follower rest; a notice behind it would wake it, and nobody would know."""
    wire = Wire()
    wire.beat(6)
    wire.beat(7, round_=3)
    await asyncio.sleep(0)
    wire.outbox.flush()
    wire.outbox.flush()

    assert [(7, 3)] == wire.beats
