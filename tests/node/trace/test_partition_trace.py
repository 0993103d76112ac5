"""The events of a partition: of what is committed, once each, and nothing while it is not traced."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from laminar.batch import Batch, Header, Kind, build, kind_of
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.node.channels.delivery import Delivery
from laminar.node.channels.requests import Step
from laminar.node.partition.partition import Partition
from laminar.node.trace.partition_trace import PartitionTrace, asked_by
from laminar.node.trace.ring import Known, TraceRing, Who
from laminar.wire.channels import ChannelSettings, Named
from tests.mutation import Mutant
from tests.node.alone import lone_partition
from tests.node.trio import batch, send, trio

ALL = {"trace": "all"}
CHANNEL = 1


def told(ring: TraceRing) -> list[tuple[str, int | None, str | None]]:
    """Events that wait, as (event, offset, principal); they wait no more."""
    return [
        (event.name, event.offset, None if event.who is None else event.who.principal)
        for event, _ in ring.take()
    ]


async def what_is_lost_in_an_election_makes_no_event() -> None:
    """A leader that is cut off proposes; the next one knows nothing of it, and takes another record."""
    async with trio() as cluster:
        rings = {node: TraceRing() for node in cluster.members}
        for node, member in cluster.members.items():
            member.partition.context.follow_trace(ALL, rings[node])
        old = await cluster.leader()
        await send(old, batch(0, b"kept"))
        assert [("appended", 0, None)] == told(rings[old.node])

        cluster.cut_off(old.node)
        lost = send(old, batch(1, b"lost", b"lost too"))
        others = [node for node in rings if node != old.node]
        new = await cluster.leader(among=others)
        await send(new, batch(1, b"instead"))
        assert [] == told(rings[old.node])
        cluster.heal()
        await cluster.settled()
        with pytest.raises(Problem):
            await lost
        await send(new, batch(2, b"more", b"more"))
        await cluster.settled()

        assert [("appended", 1, None), ("appended", 2, None), ("appended", 3, None)] == told(rings[new.node])
        assert [] == [each for node in rings if node != new.node for each in told(rings[node])]
        values = [value for frame in new.frames() for value in _values(frame)]
        assert b"lost" not in values


def _values(frame: bytes) -> list[bytes]:
    return list(map(bytes, Batch(frame).values)) if kind_of(frame) == Kind.DATA else []


async def test_what_is_lost_in_an_election_makes_no_event() -> None:
    await what_is_lost_in_an_election_makes_no_event()


TRACE = "laminar.node.trace.partition_trace:PartitionTrace"
MUTANTS = (
    Mutant(
        "an event comes before the commit",
        f"{TRACE}.appended",
        "self._pending.append((header.index, found))",
        "self._pending.append((header.index, found)); self.committed(header.index)",
    ),
    Mutant("what is truncated is kept", f"{TRACE}.truncated", "self._pending[-1][0] >= index", "False"),
    Mutant("followers make events", f"{TRACE}.appended", "self._shares is None or ", "self.begin(()) or "),
)


@pytest.fixture
def put_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mutant], None]]:
    """Puts a mutant in for this test."""

    def put(mutant: Mutant) -> None:
        function, code = mutant._changed()
        monkeypatch.setattr(function, "__code__", code)

    yield put


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
async def test_a_bug_is_noticed(mutant: Mutant, put_in: Callable[[Mutant], None]) -> None:
    put_in(mutant)

    with pytest.raises(AssertionError):
        await what_is_lost_in_an_election_makes_no_event()


async def test_appends_of_one_batch_are_each_of_who_asked(tmp_path: Path) -> None:
    """They wait for the same turn, and make one entry."""
    async with lone_partition(tmp_path) as partition:
        ring, trace = followed(partition)
        futures = []
        for name, count in (("a", 2), ("b", 1), ("c", 3)):
            with asked_by(trace, Who(name)):
                futures.append(partition.appends.append_records(Records([b"x"] * count)))
        await asyncio.gather(*futures)

        expected = [("appended", at, who) for at, who in enumerate("aabccc")]
        assert (expected, 1) == (told(ring), partition.appends.appended_batches)


def followed(
    partition: Partition, setting: str = "all", ring: TraceRing | None = None
) -> tuple[TraceRing, PartitionTrace]:
    """Let a partition trace; return the ring of its events, and its trace."""
    ring = TraceRing() if ring is None else ring
    partition.context.follow_trace({"trace": setting}, ring)
    assert partition.context.trace is not None
    return ring, partition.context.trace


async def test_what_consumers_do_is_of_who_did_it_and_times_are_of_no_one(tmp_path: Path) -> None:
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        try:
            await delivery.open(CHANNEL, "c", 1, ChannelSettings(timeout_ms=1000, retry_ms=0))
            ring, _ = followed(partition)
            await partition.appends.append_records(Records([b"x"] * 4))
            told(ring)
            jobs = await asyncio.gather(
                *(delivery.receive(CHANNEL, wanted=2, wait_s=5, who=Who(name)) for name in "ab")
            )
            first, second = [job.runs[0] for job in jobs if job is not None]
            assert [("delivered", at, who) for at, who in enumerate("aabb")] == told(ring)

            # b names what a has, and then its own; only that counts, and only that is told.
            wrong = Step("ack", Named(0, first.first, first.end, first.delivery + 1))
            own = Step("ack", Named(0, second.first, second.end, second.delivery))
            settled = await delivery.settle(CHANNEL, [wrong, own], who=Who("b"))
            assert (2, 1) == (settled.done, len(settled.late))
            assert [("acked", 2, "b"), ("acked", 3, "b")] == told(ring)

            found: list[tuple[str, int | None, str | None]] = []
            async with asyncio.timeout(60):
                while len(found) < 2:
                    await asyncio.sleep(0.02)
                    found += told(ring)
            assert [("timed_out", 0, None), ("timed_out", 1, None)] == found
        finally:
            delivery.stop()


async def test_off_calls_nothing(tmp_path: Path) -> None:
    """Not one function of the trace is called for a record of a topic that is not traced."""
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        try:
            await delivery.open(CHANNEL, "c", 1, ChannelSettings())
            ring = TraceRing()
            partition.context.follow_trace({}, ring)
            partition.context.follow_trace({"trace": "off"}, ring)

            async def live() -> None:
                await partition.appends.append_records(Records([b"x"] * 4, keys=[b"k"] * 4))
                jobs = await delivery.receive(CHANNEL, wanted=4, wait_s=5)
                assert jobs is not None
                run = jobs.runs[0]
                await delivery.settle(CHANNEL, [Step("ack", Named(0, run.first, run.end, run.delivery))])

            assert [] == await calls_of(live)
            followed(partition, ring=ring)
            assert await calls_of(live), "what counts them sees them"
        finally:
            delivery.stop()


async def calls_of(work: Callable[[], Awaitable[None]]) -> list[str]:
    """Names of the functions in `laminar/node/trace` that are called."""
    found: list[str] = []

    def count(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and "laminar/node/trace/" in frame.f_code.co_filename:
            found.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        await work()
    finally:
        sys.setprofile(before)
    return found


async def test_a_full_ring_drops_and_counts_and_the_rest_goes_on(tmp_path: Path) -> None:
    async with lone_partition(tmp_path) as partition:
        ring, _ = followed(partition, ring=TraceRing(most=3))
        for _ in range(3):
            await partition.appends.append_records(Records([b"x"] * 2, keys=[b"k", None]))

        assert {"events": 6, "written": 0, "dropped": 3, "waiting": 3} == ring.statistics()
        assert (6, [0, 1, 2]) == (partition.end_offset, [offset for _, offset, _ in told(ring)])


async def test_a_leader_that_knows_no_record_learns_of_it_by_the_delivery(tmp_path: Path) -> None:
    """As after an election: also for the events after that."""
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        try:
            await delivery.open(CHANNEL, "c", 1, ChannelSettings())
            await partition.appends.append_records(Records([b"x"] * 3, keys=[b"a", None, b"c"]))
            ring, _ = followed(partition)
            jobs = await delivery.receive(CHANNEL, wanted=3, wait_s=5)
            assert jobs is not None
            run = jobs.runs[0]
            await delivery.settle(CHANNEL, [Step("ack", Named(0, run.first, run.end, run.delivery))])

            assert [b"a", None, b"c"] * 2 == [known and known.key for _, known in ring.take()]
        finally:
            delivery.stop()


async def test_a_bug_in_the_trace_fails_no_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with lone_partition(tmp_path) as partition:
        ring, _ = followed(partition)
        for name in ("_of_entry", "_make"):
            with monkeypatch.context() as patched:
                patched.setattr(f"{TRACE.replace(':', '.')}.{name}", None)
                await partition.appends.append_records(Records([b"x"] * 2))

        assert {"events": 4, "written": 0, "dropped": 4, "waiting": 0} == ring.statistics()
        assert 1 == [each.name for each in caplog.records].count("laminar.trace")


async def test_a_change_of_the_setting_holds_from_then_on(tmp_path: Path) -> None:
    async with lone_partition(tmp_path) as partition:
        ring, _ = followed(partition, "sampled")
        await partition.appends.append_frame(*_frame(build([b"x"])))
        assert [] == told(ring)
        followed(partition, "all", ring)
        await partition.appends.append_frame(*_frame(build([b"x"])))
        assert [("appended", 1, None)] == told(ring)
        partition.context.follow_trace({"trace": "of a newer program"}, ring)
        assert partition.context.trace is None


async def test_of_a_traceparent_events_have_the_trace_and_its_span(tmp_path: Path) -> None:
    """A record's own trace id counts more; then the span, which is of another trace, is left out."""
    parent = b"00-%s-00f067aa0ba902b7-00"
    headers = [{"traceparent": parent % (b"a" * 32)}] * 3 + [{"traceparent": b"00-zz"}]
    own = [None, bytes.fromhex("aa" * 16), bytes.fromhex("bb" * 16), None]
    async with lone_partition(tmp_path) as partition:
        ring, _ = followed(partition)
        await partition.appends.append_frame(*_frame(build([b"v"] * 4, headers=headers, trace_ids=own)))

        known = [known for _, known in ring.take()]

    assert [
        None if each is None else (each.trace_id and each.trace_id[:1], each.parent_id) for each in known
    ] == [
        (b"\xaa", bytes.fromhex("00f067aa0ba902b7")),
        (b"\xaa", bytes.fromhex("00f067aa0ba902b7")),
        (b"\xbb", None),
        None,
    ]


def _frame(frame: bytearray) -> tuple[bytearray, Header]:
    return frame, Header.unpack(frame)


async def test_the_systems_topics_are_never_traced(tmp_path: Path) -> None:
    async with lone_partition(tmp_path) as partition:
        partition.context.topic = "_trace"
        partition.context.follow_trace(ALL, TraceRing())
        assert partition.context.trace is None


def test_what_is_known_of_records_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.node.trace.ring.MOST_KNOWN", 16)
    ring = TraceRing()
    for at in range(100):
        ring.know(b"g", at, Known(None, b"k", False))
        assert ring.known(b"g", at) is not None
        assert len(ring._known) <= 16
    assert ring.known(b"g", 0) is None
