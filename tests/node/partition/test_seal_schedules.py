"""A seal in any order of appends, commits and changes of the leader."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from laminar.batch import Header, Kind, stamp
from laminar.histogram import Histogram
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.node.consensus.replica import initial_frame
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from raft.values import Place
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import open_inline
from tests.node.alone import values
from tests.node.partition.seals import SEAL, asked, kinds, staged
from tests.node.trio import VOTERS, batch


class Group:
    """A partition over a real log, whose commits and next leaders a test decides."""

    def __init__(self) -> None:
        self.storage = open_inline(FaultDisk())
        self.log = self.storage.create_log("t-0", 1)
        replica: Any = SimpleNamespace(
            place=Place(2, 1, 1, 1),
            term=1,
            failure=None,
            configuration=VOTERS.configuration(),
            wall_ms=lambda: 1,
            on_match=None,
        )
        driver: Any = SimpleNamespace(
            propose=self.propose,
            before_turn_end=self.storage.before_turn_end,
            leader_requested=lambda replica: None,
            commit_times=Histogram(),
        )
        self.replica = replica
        self.partition = Partition(topic="t", number=0, driver=driver, log=self.log)
        self.partition.replica = replica
        first = initial_frame(VOTERS, created_ms=1)
        self.log.append([bytes(first)])
        self.partition.appended(Header.unpack(first), first)

    def propose(
        self, replica: Any, frame: bytearray, *, opens_segment: bool, not_before_ms: int
    ) -> tuple[int, int, int]:
        log = self.log
        base_offset = log.next_offset
        stamp(
            frame,
            index=log.last_index + 1,
            term=self.replica.term,
            prev_term=log.last_term,
            base_offset=base_offset,
            append_time_ms=max(log.last_append_time_ms, not_before_ms),
            committed_index=self.partition.committed_index,
        )
        log.append([bytes(frame)])
        self.partition.appended(Header.unpack(frame), frame)
        return log.last_index, self.replica.term, base_offset

    def commit(self, behind_end: int) -> None:
        index = self.log.last_index - behind_end
        if index > self.partition.committed_index:
            self.partition.committed(index)

    def next_leader(self, entries: int) -> None:
        """Another one leads, which lacks the last entries; then this replica leads again."""
        self.replica.place = None
        self.partition.led(False)
        index = max(self.log.last_index + 1 - entries, self.partition.committed_index + 1)
        if index <= self.log.last_index:
            self.log.truncate(index)
            self.partition.truncated(index)
        self.replica.term += 1
        self.replica.place = Place(self.log.last_index + 1, self.replica.term, self.log.last_term, 1)
        self.partition.led(True)


STEPS = st.one_of(
    st.tuples(st.just("produce"), st.integers(0, 1)),
    st.tuples(st.just("produce"), st.integers(0, 1)),
    st.tuples(st.just("records")),
    st.tuples(st.just("stage")),
    st.tuples(st.just("cursor")),
    st.tuples(st.just("seal")),
    st.tuples(st.just("commit"), st.integers(0, 2)),
    st.tuples(st.just("next_leader"), st.integers(0, 4)),
)


@settings(max_examples=200, deadline=None)
@example([("seal",), ("records",), ("next_leader", 1), ("records",), ("commit", 0)])
@example([("produce", 0), ("seal",), ("produce", 0), ("cursor",), ("commit", 1), ("produce", 0)])
@example([("records",), ("records",), ("records",), ("seal",), ("records",), ("commit", 0)])
@given(st.lists(STEPS, max_size=30))
def test_no_record_follows_a_committed_seal_and_none_is_refused_before(script: list[Any]) -> None:
    """What is acknowledged is in the log once, what is refused is not; each answer judged when it comes."""

    async def main() -> None:
        group = Group()
        partition = group.partition
        acknowledged: list[bytes] = []
        refused: list[bytes] = []
        waiting: list[tuple[bytes, asyncio.Future[Receipt]]] = []

        def judge(value: bytes, problem: Problem) -> None:
            assert "not_applied" == problem.outcome, problem
            committed = kinds(partition)[: partition.committed_index]
            if problem.code == "sealed":
                assert Kind.SEAL in committed, f"sealed is said, and these are committed: {committed}"
            else:
                assert problem.code == "not_leader", problem
            refused.append(value)

        async def collect() -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            for value, each in waiting[:]:
                if each.done():
                    waiting.remove((value, each))
                    error = each.exception()
                    assert error is None or isinstance(error, Problem), error
                    if error is None:
                        acknowledged.append(value)
                    else:
                        judge(value, error)

        for number, (name, *arguments) in enumerate(script, start=1):
            value = b"%d" % number
            before = kinds(partition)
            try:
                if name == "produce":
                    producer = bytes([arguments[0] + 1]) * 16
                    known = partition.producers.progress(producer)
                    sequence = 0 if known is None else known.sequence + 1
                    waiting.append((value, asked(partition, batch(sequence, value, producer=producer))))
                elif name == "records":
                    waiting.append((value, partition.appends.append_records(Records([value]))))
                elif name == "stage":
                    waiting.append((b"", staged(partition, stage=number)))
                elif name == "cursor":
                    set_cursor = partition.cursor_commands.set
                    moved = set_cursor("c", 0, expected=None, check=False, owner="", now_ms=1)
                    waiting.append((b"", moved))
                elif name == "seal":
                    waiting.append((b"", partition.propose_seal(SEAL)))
                else:
                    getattr(group, name)(*arguments)
            except Problem as problem:
                if problem.code == "in_progress":
                    assert name == "seal" and Kind.STAGED in before
                else:
                    assert Kind.SEAL in before
                    judge(value, problem)
            await collect()
            after = kinds(partition)
            if Kind.SEAL in after:
                behind = after[after.index(Kind.SEAL) + 1 :]
                assert set(behind) <= {Kind.CURSOR}, f"behind the seal: {behind}"
        # In the end each has an answer.
        while waiting:
            group.commit(0)
            await collect()

        found = [bytes(value) for value in await values(partition)]
        assert len(set(found)) == len(found)
        assert {each for each in acknowledged if each} == set(found)
        assert not set(refused) & set(found)
        await group.storage.close()

    asyncio.run(main())
