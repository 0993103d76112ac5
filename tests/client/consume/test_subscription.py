"""Members of groups on a real node: nothing is skipped, and nothing is read twice that was committed."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import laminar
from laminar import aio
from laminar.client.consume.group import membership, partition_leases
from laminar.testing.nodes import serve
from tests.client.members import MemberProcess, Place, Writing, check, ended, until

# So many that no member draws none.
PARTITIONS = 16


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One node of two shards."""
    with serve(shards=2) as found:
        yield found


@pytest.fixture
def topic(url: str, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own."""
    name = request.node.name.replace("[", "-").replace("]", "")
    with laminar.connect(url) as client:
        client.create_topic(name, partitions=PARTITIONS)
    return str(name)


async def fill(topic: aio.Topic[bytes], count: int) -> None:
    """`count` records in each partition."""
    async with topic.producer() as producer:
        for number in range(count):
            for partition in range(PARTITIONS):
                producer.send(b"%d" % number, partition=partition)


def fill_now(url: str, topic: str, count: int) -> dict[int, int]:
    """The same without a loop; where the partitions end."""
    with laminar.connect(url) as client:
        with client.topic(topic).producer() as producer:
            for number in range(count):
                for partition in range(PARTITIONS):
                    producer.send(b"%d" % number, partition=partition)
        return client.topic(topic).offsets("latest")


class Reading:
    """A member that commits after each record, until it is told to end."""

    def __init__(self, topic: aio.Topic[bytes], seen: list[Place], *, group: str = "g") -> None:
        self.records = topic.subscribe(group, session=20.0)
        self.mine: list[Place] = []
        self._seen = seen
        self._commits = False
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        async with self.records as records:
            async for record in records:
                self._commits = True
                self.mine.append((record.partition, record.offset))
                self._seen.append((record.partition, record.offset))
                await records.commit()
                self._commits = False

    async def leave(self) -> None:
        """Its block ends by an exception, when the record in its hand is committed: that stands."""
        await eventually(lambda: not self._commits)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for what members do in their own time."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "not within 60 s"
        await asyncio.sleep(0.01)


async def test_members_that_join_and_leave_read_everything_once(url: str, topic: str) -> None:
    """While records come, each partition is one member's at a time, and goes on where it was committed."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        seen: list[Place] = []
        first = Reading(handle, seen)
        await fill(handle, 8)
        await eventually(lambda: len(seen) >= 60)
        second = Reading(handle, seen)
        await eventually(lambda: second.records.partitions)
        await fill(handle, 8)
        await eventually(lambda: len(seen) == 16 * PARTITIONS)
        # Both have one for a moment whose new owner hears of it before the old one does.
        await eventually(
            lambda: sorted([*first.records.partitions, *second.records.partitions]) == [*range(PARTITIONS)]
        )
        owned = (first.records.partitions, second.records.partitions)
        described = await handle.describe_cursor("g")
        await second.leave()
        await fill(handle, 2)
        await eventually(lambda: len(seen) == 18 * PARTITIONS)
        third = Reading(handle, seen)
        await eventually(lambda: third.records.partitions)
        await first.leave()
        await fill(handle, 2)
        await eventually(lambda: len(seen) == 20 * PARTITIONS)
        await third.leave()
        after = await handle.describe_cursor("g")

    assert owned[0] and owned[1]
    assert 2 == len(set(described.owners.values()))
    assert {1} == set(Counter(seen).values())
    assert (0, {}) == (after.total_lag, after.owners)


async def test_what_is_handed_over_is_committed_first(url: str, topic: str) -> None:
    """The old owner reads no further, and the new one waits for its commit."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        await fill(handle, 10)
        async with handle.subscribe("g", session=5.0) as old:
            stream = aiter(old)
            seen = [await anext(stream) for _ in range(10 * PARTITIONS - 1)]
            async with handle.subscribe("g", session=5.0) as new:
                waiting = asyncio.ensure_future(anext(aiter(new)))
                await asyncio.sleep(5.5)
                assert not waiting.done(), "everything was handed out already, and is not committed"
                while len(seen) < 10 * PARTITIONS:
                    seen.append(await anext(stream))
                await old.commit()
                await eventually(lambda: new.partitions)
                await eventually(lambda: old.partitions | new.partitions == set(range(PARTITIONS)))
                mine = sorted(new.partitions)[0]
                await handle.append(b"more", partition=mine)
                record = await waiting
                assert (mine, 10) == (record.partition, record.offset)
    assert {1} == set(Counter((each.partition, each.offset) for each in seen).values())


async def test_who_does_not_commit_in_time_is_told_at_its_next_commit(url: str, topic: str) -> None:
    """`handover` is over: others read on from what was committed, which is read again; the rest goes on."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        await fill(handle, 2)
        async with handle.subscribe("g", session=20.0, handover=0.5) as old:
            stream = aiter(old)
            seen = {
                (each.partition, each.offset) for each in [await anext(stream) for _ in range(2 * PARTITIONS)]
            }
            async with handle.subscribe("g", session=20.0) as new:
                other = aiter(new)
                again = await anext(other)
                assert (again.partition, again.offset) in seen
                assert again.partition in new.partitions and again.partition not in old.partitions
                told: list[str] = []
                while True:
                    try:
                        await old.commit()
                        break
                    except laminar.Fenced as fenced:
                        told += str(fenced.value).split(", ")
                assert str(again.partition) in told and len(told) == len(set(told))
                kept = (await handle.cursor("g")).items()
                assert dict.fromkeys(old.partitions, 2).items() <= kept


async def test_who_waits_for_more_and_commits_nothing_holds_up_nobody_for_longer_than_the_dead(
    url: str, topic: str
) -> None:
    """Its loop can't commit while it waits: after a session others read on, from what was committed."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        await fill(handle, 1)
        async with handle.subscribe("g", session=2.0, handover=600.0) as old:
            stream = aiter(old)
            for _ in range(PARTITIONS):
                await anext(stream)
            waiting = asyncio.ensure_future(anext(stream))
            async with handle.subscribe("g", session=2.0) as new:
                again = await anext(aiter(new))
                assert 0 == again.offset and again.partition in new.partitions
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            with pytest.raises(laminar.Fenced):
                await old.commit()


async def test_a_member_with_a_new_name_is_not_waited_for_under_the_old(url: str, topic: str) -> None:
    """Else its share would be nobody's until that session is over."""
    async with aio.connect(url) as client:

        async def members() -> list[str]:
            document = await client.session.get_json(f"/v1/topics/{topic}/groups/g")
            return [each["member"] for each in document["members"]]

        async with client.topic(topic).subscribe("g", session=60.0) as records:
            await eventually(lambda: len(records.partitions) == PARTITIONS)
            (old,) = await members()
            records._membership.valid_until_s = time.monotonic()  # as after a session without an answer
            began_s = time.monotonic()
            while (now := await members()) == [old] or len(now) > 1:
                assert time.monotonic() < began_s + 45
                await asyncio.sleep(0.05)
            assert len(records.partitions) == PARTITIONS


async def test_who_gets_no_answer_asks_again_before_its_session_is_over(
    url: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one answer that is late costs it its name, and everybody their partitions."""
    async with aio.connect(url) as client, client.topic(topic).subscribe("g", session=60.0) as records:
        renew, answers = records._membership.renew, asyncio.Queue[bool]()

        async def fails_once(*, timeout_s: float) -> None:
            if answers.empty():
                monkeypatch.setattr(membership, "RENEW_S", 3600.0)
                answers.put_nowait(False)
                raise laminar.Unavailable("not now", code="no_leader")
            await renew(timeout_s=timeout_s)
            answers.put_nowait(True)

        monkeypatch.setattr(records._membership, "renew", fails_once)
        await eventually(lambda: answers.qsize() == 2)


async def test_a_cluster_that_needs_longer_for_a_look_than_a_step_may_take_is_given_longer(
    url: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where hundreds of partitions are asked and all CPUs are busy, a member asked for ever, in vain."""
    monkeypatch.setattr(partition_leases, "STEP_TIMEOUT_S", 0.01)
    monkeypatch.setattr(partition_leases, "LEASE_ATTEMPT_S", 0.005)
    needed_s = 0.1
    async with aio.connect(url) as client:
        await fill(client.topic(topic), 1)
        records = client.topic(topic).subscribe("g", session=60.0)
        assert client._session is not None
        call, given_s = client._session.call, list[float]()

        async def slow(method: str, path: str, **named: Any) -> Any:
            if method != "GET" or not path.endswith("/cursors/g"):
                return await call(method, path, **named)
            given_s.append(named["timeout_s"])
            if named["attempt_timeout_s"] < needed_s:
                await asyncio.sleep(named["timeout_s"])
                raise laminar.Unavailable("not answered in time", code="timed_out")
            await asyncio.sleep(needed_s)
            return await call(method, path, **named)

        monkeypatch.setattr(client._session, "call", slow)
        async with records:
            await eventually(lambda: len(records.partitions) == PARTITIONS)
    assert given_s[:2] == [0.01, 0.02]


async def test_every_member_of_a_broadcast_reads_all(url: str, topic: str) -> None:
    """Each under its own name, and on from there; whoever comes under a name that is in use takes it over."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        await fill(handle, 3)

        async def read(member: str, count: int) -> set[Place]:
            found = set()
            async with handle.subscribe("news", "broadcast", member) as records:
                async for record in records:
                    found.add((record.partition, record.offset))
                    if len(found) == count:
                        break
            return found

        every = {(partition, offset) for partition in range(PARTITIONS) for offset in range(3)}
        first, second = await asyncio.gather(read("a", 3 * PARTITIONS), read("b", 3 * PARTITIONS))
        assert every == first == second
        await fill(handle, 1)
        assert {(partition, 3) for partition in range(PARTITIONS)} == await read("a", PARTITIONS)
        with pytest.raises(laminar.Fenced, match="member 'b'"):
            async with handle.subscribe("news", "broadcast", "b") as older:
                await anext(aiter(older))
                async with handle.subscribe("news", "broadcast", "b") as newer:
                    assert 3 == (await anext(aiter(newer))).offset
                    async for _ in older:
                        pass
        assert {(partition, 3) for partition in range(PARTITIONS)} == await read("b", PARTITIONS)


async def test_a_group_is_asked_for_what_it_can_be(url: str, topic: str) -> None:
    """A mode, a name for who needs one, and no two modes in a group."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        with pytest.raises(laminar.ConfigError):
            handle.subscribe("g", "broadcast")
        with pytest.raises(laminar.ConfigError):
            handle.subscribe("g", "both")  # type: ignore[arg-type]
        async with handle.subscribe("g"):
            with pytest.raises(laminar.Error, match="another mode"):
                async with handle.subscribe("g", "broadcast", "a"):
                    pass
        with pytest.raises(laminar.NotFound):
            async with client.topic("nowhere").subscribe("g"):
                pass


def test_a_loop_that_breaks_off_in_a_batch_goes_on_in_it(url: str, topic: str) -> None:
    """Without a loop of its own: commits cover what was seen, and the next member reads the rest."""
    ends = fill_now(url, topic, 10)
    with laminar.connect(url) as client:
        handle = client.topic(topic)
        seen = []
        with handle.subscribe("g", session=2.0) as records:
            for _ in range(5):
                for record in records:
                    seen.append((record.partition, record.offset))
                    if len(seen) % 5 == 0:
                        break
            records.commit()
        assert 25 == sum(handle.cursor("g").values())
        with handle.subscribe("g", session=2.0) as records:
            for batch in records.batches():
                seen += [(batch.partition, offset) for offset in batch.offsets]
                if len(seen) == sum(ends.values()):
                    break
        assert 0 == handle.describe_cursor("g").total_lag
    assert {1} == set(Counter(seen).values())


async def test_who_is_interrupted_while_waiting_skips_nothing(url: str, topic: str) -> None:
    """A batch that was taken for a loop that is not there any more comes again."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        await fill(handle, 3)
        async with handle.subscribe("g", session=2.0) as records:
            lease, batch = await records.take()
            await fill(handle, 1)
            seen = []
            async for record in records:
                seen.append((record.partition, record.offset))
                if len(seen) == 4 * PARTITIONS:
                    break
    assert lease.partition == batch.partition
    assert {(partition, offset) for partition in range(PARTITIONS) for offset in range(4)} == set(seen)


def everything(members: list[MemberProcess], ends: dict[int, int]) -> int:
    """Wait until all was read, and check how; how many records came twice."""
    total = sum(ends.values())
    until(lambda: len(set[Place]().union(*(each.places for each in members))) == total, "all is read")
    return check(members, ends)


def test_what_a_killed_member_owned_is_read_on_by_another(url: str, topic: str) -> None:
    """kill -9: a session later, from its last commit; what it was given since comes again, nothing else."""
    # The one that stays is not taken for dead, too, when it stands still.
    members = [MemberProcess([url], topic, "g", session_s=each, every=4) for each in (2.0, 20.0)]
    with ended(members), Writing([url], topic, PARTITIONS, pause_s=0.4) as writing:
        until(lambda: all(len(member.read) > 8 for member in members), "both read")
        members[0].kill()
        killed_s = time.monotonic()
        theirs = {partition for partition, _ in members[0].read}
        until(lambda: theirs <= {place[0] for place in members[1].read_since(killed_s)}, "its partitions")
        taken_s = time.monotonic() - killed_s
        doubled = everything(members, writing.end())
    assert taken_s < 60
    assert doubled <= len(members[0].uncommitted)


def test_a_member_that_stood_still_hands_out_nothing_that_another_committed(url: str, topic: str) -> None:
    """It was taken for dead while it was stopped; when it goes on it looks first what it owns still."""
    members = [MemberProcess([url], topic, "g", session_s=each, every=2) for each in (2.0, 20.0)]
    with ended(members), Writing([url], topic, PARTITIONS, pause_s=0.4) as writing:
        until(lambda: all(len(member.read) > 8 for member in members), "both read")
        members[0].process.send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        theirs = {partition for partition, _ in members[0].read}
        until(lambda: theirs <= {place[0] for place in members[1].read_since(stopped_s)}, "its partitions")
        members[0].process.send_signal(signal.SIGCONT)
        went_on_s = time.monotonic()
        until(lambda: len(members[0].read_since(went_on_s)) > 8, "it reads again")
        everything(members, writing.end())


def test_a_subscription_is_entered_before_it_is_read(url: str, topic: str) -> None:
    """Without `with` nobody renews the membership: said at once, instead of waiting for ever."""
    with laminar.connect(url) as client:
        subscription = client.topic(topic).subscribe(group="g")
        with pytest.raises(laminar.ConfigError, match="not open"):
            next(iter(subscription))
        with pytest.raises(laminar.ConfigError, match=r"with topic\.subscribe"):
            next(subscription.batches())


async def test_also_on_an_event_loop(url: str, topic: str) -> None:
    async with aio.connect(url) as client:
        subscription = client.topic(topic).subscribe(group="g")
        with pytest.raises(laminar.ConfigError, match="not open"):
            await anext(aiter(subscription))
        with pytest.raises(laminar.ConfigError, match="not open"):
            await anext(subscription.batches())
