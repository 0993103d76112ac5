"""A partition on three members: what is acknowledged stays, whatever stops, is lost or comes late."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from laminar.batch import Header
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.log.disk.errors import StorageClosed
from laminar.node.partition.receipts import Receipt
from laminar.node.transport.transport import Channel
from raft.messages import AnyMessage, Append, AppendAnswer, Heartbeat, PreVote, Vote
from tests.node.trio import CALM, CALM_S, GROUP, NODES, PATIENCE_S, Member, Trio, batch, send, trio

Messages = list[AnyMessage]


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("seed", range(2))
async def test_pitfall_40_what_is_acknowledged_survives_the_end_of_all_three_under_load(
    seed: int, power: bool
) -> None:
    """`kill -9`, or power loss, of everybody in the same instant, again and again: nothing acknowledged is
    lost, doubled or reordered, and the producer tables are equal on all replicas.
    """
    async with trio(seed=seed) as cluster:
        cluster.disk_takes_s = 0.004
        async with load_on(cluster) as load:
            for _ in range(4):
                await load.acknowledges(60)
                await asyncio.sleep(cluster.rng.random() * 0.02)
                await asyncio.gather(
                    *(member.cut_power() if power else member.kill() for member in cluster.alive)
                )
                for member in cluster.members.values():
                    await member.start()
        await cluster.settled()

        cluster.check_equal()
        load.check(cluster.alive[0].values())


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_lost_under_kills_cuts_losses_and_slow_disks(seed: int) -> None:
    """One fault after the other under load, then all is healed, equal and complete."""
    async with trio(seed=seed) as cluster:
        cluster.disk_takes_s = 0.002
        rng = random.Random(seed)

        def bad(sender: Member, receiver: Member, channel: Channel, messages: object) -> float | None:
            if rng.random() < 0.03:
                return None
            return rng.random() * 0.03 if rng.random() < 0.2 else 0

        async with load_on(cluster) as load:
            for _ in range(10):
                await load.acknowledges(20)
                leader = next((m for m in cluster.alive if m.partition.leads), None)
                victim = rng.choice([*cluster.members.values(), *([leader] * 3 if leader else [])])
                fault = rng.randrange(5)
                cluster.wire = bad
                if fault == 0:
                    cluster.cut_off(victim.node)
                elif fault == 1:
                    victim.hold_disk()
                    await asyncio.sleep(rng.random() * 0.1)
                    await victim.cut_power()
                elif fault == 2:
                    victim.hold_disk()
                elif fault == 3:
                    await victim.kill()
                else:
                    await victim.cut_power()
                await asyncio.sleep(0.1 + rng.random() * 0.4)
                for member in cluster.members.values():
                    if not member.alive:
                        await member.start()
                    elif member.held is not None:
                        member.release_disk()
                cluster.heal()
        await cluster.settled()

        cluster.check_equal()
        load.check(cluster.alive[0].values())


class Load:
    """Idempotent producers that retry until acknowledged, each with several batches in flight.

    They append wherever somebody believes to lead, so also at leaders that were deposed.
    """

    def __init__(self, cluster: Trio) -> None:
        self._cluster = cluster
        self.acknowledged: list[dict[int, Receipt]] = [{} for _ in range(3)]
        self.sent = [0, 0, 0]
        self.retries = 0
        self.stopping = False

    async def acknowledges(self, count: int) -> None:
        """Wait for so many more acknowledgements."""
        target = sum(map(len, self.acknowledged)) + count
        await self._cluster.until(
            lambda: sum(map(len, self.acknowledged)) >= target, what=f"{count} acknowledgements"
        )

    async def produce(self, number: int) -> None:
        """Until `stopping`, and until all that was sent is acknowledged."""
        done = self.acknowledged[number]
        while not self.stopping or len(done) < self.sent[number]:
            leaders = [member for member in self._cluster.alive if member.partition.leads]
            futures: list[asyncio.Future[Receipt]] = []
            first = len(done)  # acknowledged without a gap
            if leaders:
                member = self._cluster.rng.choice(leaders)
                for sequence in range(first, first + 6):
                    if self.stopping and sequence >= self.sent[number]:
                        break
                    frame = batch(sequence, *_values(number, sequence), producer=b"producer-%07d" % number)
                    try:
                        futures.append(send(member, frame))
                    except Problem as problem:
                        assert problem.code in ("out_of_sequence", "not_leader"), problem
                        break
                    self.sent[number] = max(self.sent[number], sequence + 1)
            if not futures:
                await asyncio.sleep(0.005)
                continue
            await asyncio.wait(futures, timeout=0.15)
            for sequence, future in enumerate(futures, first):
                if not future.done() or future.exception() is not None:
                    self.retries += 1
                    break
                done[sequence] = future.result()
            for future in futures:
                future.add_done_callback(lambda future: future.cancelled() or future.exception())

    def check(self, values: list[bytes]) -> None:
        """Everything acknowledged is where its receipt says, once, in order, and nothing else is there."""
        for number, done in enumerate(self.acknowledged):
            for sequence, receipt in done.items():
                here = values[receipt.offset : receipt.offset + receipt.count]
                assert _values(number, sequence) == here, f"batch {sequence} of {number} is not at {receipt}"
            mine = [value for value in values if value.startswith(b"%d:" % number)]
            assert [value for sequence in sorted(done) for value in _values(number, sequence)] == mine


def _values(number: int, sequence: int) -> list[bytes]:
    return [b"%d:%d:%d" % (number, sequence, record) for record in range(1 + sequence % 3)]


@asynccontextmanager
async def load_on(cluster: Trio) -> AsyncIterator[Load]:
    """Load within, all of it acknowledged at the end."""
    load = Load(cluster)
    tasks = [asyncio.ensure_future(load.produce(number)) for number in range(3)]
    try:
        yield load
        load.stopping = True
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_pitfall_53_a_follower_with_an_old_tail_commits_only_what_it_has_matched() -> None:
    """A deposed leader comes back with entries nobody else has; it hears of commits beyond them before it is
    sent what was committed there.
    """
    async with trio() as cluster:
        old = await cluster.leader()
        await send(old, batch(0, b"common"))
        await cluster.settled()
        cluster.cut_off(old.node)
        lost = [send(old, batch(1 + number, b"old tail %d" % number)) for number in range(20)]
        await cluster.until(lambda: old.partition.log.durable_index == old.partition.log.last_index)
        others = [node for node in NODES if node != old.node]
        new = await cluster.leader(among=others)
        await asyncio.gather(
            *(send(new, batch(number, b"new %d" % number, producer=b"q" * 16)) for number in range(20))
        )
        tail = old.partition.log.last_index
        assert old.partition.committed_index < tail <= new.partition.committed_index

        # Heartbeats, which carry the commit index, pass; appends do not, yet.
        seen: list[int] = []

        def no_appends(
            sender: Member, receiver: Member, channel: Channel, messages: Messages
        ) -> float | None:
            if receiver is old and any(isinstance(message, Append) for message in messages):
                return None
            seen.extend(message.commit for message in messages if isinstance(message, Heartbeat))
            return 0

        cluster.wire = no_appends
        await cluster.until(lambda: max(seen, default=0) >= tail, what="a heartbeat with the commit index")
        await asyncio.sleep(0.1)
        assert old.values() == [b"common"], "an old tail was committed"
        cluster.heal()
        await cluster.settled()

        assert [b"common", *(b"new %d" % number for number in range(20))] == old.values()
        for future in lost:
            error = future.exception()
            assert isinstance(error, Problem) and error.outcome == "not_applied"
        cluster.check_equal()


@pytest.mark.parametrize("where", ["on_frame", "_synced", "_expire", "propose"])
async def test_a_mistake_in_a_core_stops_that_replica_alone(where: str) -> None:
    """It never goes on with a core and a log that may disagree: it falls silent, waiters are told, once. The
    process goes on with its other groups, and a restart brings the replica back.
    """
    async with trio() as cluster:
        leader = await cluster.leader()
        machine = leader.partition

        def unanswered(
            sender: Member, receiver: Member, channel: Channel, messages: Messages
        ) -> float | None:
            return None if any(isinstance(message, AppendAnswer) for message in messages) else 0

        cluster.wire = unanswered
        waiting = send(leader, batch(0, b"x"))

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("a mistake")

        core = leader.replica.core
        if where == "on_frame":
            core.receive = broken  # type: ignore[method-assign]
        elif where == "_synced":
            core.persisted = broken  # type: ignore[method-assign]
        elif where == "_expire":
            core.expire = broken  # type: ignore[method-assign]
        else:
            machine.appended = broken  # type: ignore[method-assign]
            refused = send(leader, batch(1, b"y"))
            assert isinstance(refused.exception(), Problem)
        stopped = leader.stopped
        async with asyncio.timeout(PATIENCE_S):
            while not stopped:  # noqa: ASYNC110  # a list, filled from within
                await asyncio.sleep(0.002)
            with pytest.raises(Problem) as problem:
                await waiting
            assert "outcome_unknown" == problem.value.code
            with pytest.raises(Problem):
                await machine.reader.confirmed_end()
        sent: list[object] = []

        def listening(sender: Member, receiver: Member, channel: Channel, messages: Messages) -> float:
            sent.extend(messages if sender is leader else [])
            return 0

        cluster.wire = listening

        assert ["a mistake"] == [str(error) for error in stopped]
        assert [] == leader.failures and 1 == leader.driver.statistics()["stopped_replicas"]
        assert not machine.leads
        with pytest.raises(Problem):
            await machine.appends.append_records(Records([b"z"]))
        stopped.clear()
        await cluster.leader(among=[node for node in NODES if node != leader.node])
        assert [] == sent, "it still speaks"
        await leader.kill()
        await leader.start()
        await cluster.settled()
        assert leader.replica.failure is None


async def test_whoever_waits_on_a_replica_that_is_removed_is_told() -> None:
    """Appends, knocks at the door, confirmations and readers; and nothing can be appended any more."""
    async with trio() as cluster:
        leader = await cluster.leader()
        partition = leader.partition
        cluster.cut_off(leader.node)
        append = send(leader, batch(0, b"x"))
        knocks = [partition.appends.append_records(Records([b"y"])) for _ in range(3)]
        confirmation = asyncio.ensure_future(partition.reader.confirmed_end())
        reader = asyncio.ensure_future(partition.reader.wait_past(100, 600.0))
        await asyncio.sleep(0)

        leader.driver.remove(GROUP, StorageClosed("deleted"))

        async with asyncio.timeout(PATIENCE_S):
            for future in (append, *knocks):
                with pytest.raises(Problem) as problem:
                    await future
                assert problem.value.code in ("outcome_unknown", "not_leader")
            with pytest.raises(Problem):
                await confirmation
            assert not await reader
            with pytest.raises(Problem):
                await partition.reader.confirmed_end()
        with pytest.raises(Problem):
            await partition.appends.append_records(Records([b"z"]))
        await asyncio.sleep(0.05)
        assert partition.log.last_index == partition.log.index_of_time(1 << 60) - 1


async def test_a_journal_never_holds_an_entry_without_its_term() -> None:
    """A frame of the journal may be cut anywhere between two records: so term and vote go first. Here to a
    follower that hears of a term only by its leader's append.
    """
    async with trio() as cluster:
        leader = await cluster.leader()
        late = cluster.followers(leader)[0]
        cluster.cut_off(late.node)
        await leader.kill()
        await leader.start()
        deaf_to = (PreVote, Vote, Heartbeat)
        order: list[tuple[str, int]] = []
        storage, log = late.storage, late.partition.log
        record, append = storage.record_hard_state, log.append

        def recorded(replica_id: int, *, term: int, vote: int) -> None:
            order.append(("term", term))
            record(replica_id, term=term, vote=vote)

        def appended(frames: Any) -> None:
            order.extend(("entry", Header.unpack(frame).term) for frame in frames)
            append(frames)

        def appends_only(
            sender: Member, receiver: Member, channel: Channel, messages: Messages
        ) -> float | None:
            if late not in (sender, receiver):
                return 0
            if sender is late:
                return None if any(isinstance(message, PreVote | Vote) for message in messages) else 0
            return None if any(isinstance(message, deaf_to) for message in messages) else 0

        storage.record_hard_state = recorded  # type: ignore[method-assign]
        log.append = appended  # type: ignore[method-assign]
        before = late.replica.core.term
        cluster.wire = appends_only
        await cluster.until(lambda: late.replica.core.term > before, what="a new term by an append")

        known = before
        for kind, term in order:
            known = max(known, term) if kind == "term" else known
            assert term <= known, f"an entry of term {term} was recorded before its term: {order}"
        assert ("entry", known) in order


async def test_pitfall_26_a_retry_at_the_next_leader_gets_the_offsets_of_the_first_try() -> None:
    """Exactly once over a change of leader: the producer's table is a function of the log, so whoever leads
    knows what was appended though nobody was answered; and an older epoch is fenced there, too.
    """
    async with trio(seed=26) as cluster:
        first = await cluster.leader()
        await send(first, batch(0, b"a", epoch=1))
        # The answers to the next one are lost, and so is the leader before it can tell anybody.
        cluster.wire = lambda sender, receiver, channel, messages: (
            None if any(isinstance(message, AppendAnswer) for message in messages) else 0
        )
        pending = send(first, batch(1, b"b", b"c", epoch=1))
        last = first.partition.log.last_index
        others = cluster.followers(first)
        await cluster.until(
            lambda: all(other.partition.log.last_index == last for other in others), what="both hold it"
        )
        await first.kill()
        cluster.heal()
        second = await cluster.leader(among=[other.node for other in others])

        again = await send(second, batch(1, b"b", b"c", epoch=1))
        assert (1, 2, True) == (again.offset, again.count, again.duplicate)
        assert 3 == (await send(second, batch(2, b"d", epoch=1))).offset
        with pytest.raises(Problem) as fenced:
            await send(second, batch(3, b"old", epoch=0))
        assert "not_applied" == fenced.value.outcome
        assert [b"a", b"b", b"c", b"d"] == second.values()
        if pending.done() and not pending.cancelled():
            pending.exception()


async def test_a_cursor_that_may_still_be_lost_is_shown_to_nobody() -> None:
    """A change shows when it is committed, at every replica; one that is cut never did."""
    async with trio() as cluster:
        old = await cluster.leader()
        await send(old, batch(0, *[b"x"] * 10))
        await old.partition.cursor_commands.set("c", 3, expected=None, check=False, owner="", now_ms=1)
        await cluster.settled()
        cluster.cut_off(old.node)
        lost = old.partition.cursor_commands.set("c", 9, expected=3, check=True, owner="", now_ms=1)
        made = old.partition.cursor_commands.set("new", 1, expected=None, check=False, owner="", now_ms=1)

        shown = [old.partition.cursor_commands.get(name) for name in ("c", "new")]
        assert [3, None] == [cursor and cursor.position for cursor in shown]
        new = await cluster.leader(among=[node for node in NODES if node != old.node])
        cluster.heal()
        await asyncio.wait([lost, made])
        await cluster.settled()

        assert all(isinstance(future.exception(), Problem) for future in (lost, made))
        for member in (old, new):
            assert ["c"] == member.partition.cursors.names()
            cursor = member.partition.cursor_commands.get("c")
            assert cursor is not None and 3 == cursor.position


async def test_what_a_deposed_leader_let_somebody_own_is_not_his() -> None:
    """Cut off, it takes a claim that never commits; who claims at the new leader owns it for everybody."""

    def change(member: Member, position: int, owner: str, expected_owner: str) -> asyncio.Future[Receipt]:
        return member.partition.cursor_commands.set(
            "c", position, expected=None, check=False, owner=owner, expected_owner=expected_owner, now_ms=1
        )

    async with trio() as cluster:
        old = await cluster.leader()
        await send(old, batch(0, *[b"x"] * 10))
        await change(old, 1, "", "")
        await cluster.settled()
        cluster.cut_off(old.node)
        lost = change(old, 1, "deposed", "")
        moved = change(old, 5, "deposed", "deposed")
        new = await cluster.leader(among=[node for node in NODES if node != old.node])
        await change(new, 1, "elected", "")
        with pytest.raises(Problem) as refused:
            change(new, 5, "deposed", "deposed")
        await change(new, 2, "elected", "elected")
        cluster.heal()
        await asyncio.wait([lost, moved])
        await cluster.settled()

        assert ("fenced", "elected") == (refused.value.code, refused.value.limit)
        assert all(isinstance(future.exception(), Problem) for future in (lost, moved))
        for member in (old, new):
            cursor = member.partition.cursor_commands.get("c")
            assert cursor is not None and (2, "elected") == (cursor.position, cursor.owner)


async def test_pitfall_44_a_loop_that_stood_still_starts_no_election() -> None:
    """Leader and followers alike: the silence was their own."""
    async with trio(settings=CALM) as cluster:
        leader = await cluster.leader()
        term = leader.replica.core.term
        for _ in range(2):
            time.sleep(CALM_S)  # noqa: ASYNC251  # that is the fault
            await asyncio.sleep(CALM_S / 2)

        assert [term] * 3 == [member.replica.core.term for member in cluster.alive]
        assert leader.partition.leads
        assert all(member.driver.statistics()["stalls"] for member in cluster.alive)


async def test_a_follower_that_was_away_for_long_catches_up_from_cold_files() -> None:
    """Its appends are read from disk one after another and leave in order, not one a heartbeat."""
    async with trio() as cluster:
        leader = await cluster.leader()
        away = cluster.followers(leader)[0]
        await away.kill()
        for number in range(120):
            await send(leader, batch(number, bytes(100_000)))
        for member in cluster.alive:
            await member.storage.checkpoint()
            member.disk.cold = True
        await away.start()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await cluster.settled()
        took_s = loop.time() - began
        refused = cluster.refused
        for member in cluster.alive:
            member.disk.cold = False

        cluster.check_equal()
        assert 120 == len(away.values())
        assert refused <= 3, f"{refused} appends came out of order, {took_s:.2f} s"


async def test_a_batch_of_16_mib_is_replicated_and_elections_go_on() -> None:
    """One entry larger than an append, a bulk frame and the follower's window."""
    async with trio(settings=CALM) as cluster:
        leader = await cluster.leader()
        term = leader.replica.core.term
        large = bytes(16 << 20)

        receipts = [await send(leader, batch(number, large, b"small")) for number in range(2)]

        assert [0, 2] == [receipt.offset for receipt in receipts]
        await cluster.settled()
        assert term == leader.replica.core.term
        last = leader.partition.committed_index
        assert 1 == len({await member.partition.log.digest(last) for member in cluster.alive})


async def test_pitfall_46_append_times_never_go_back_over_leaders_whose_clocks_differ() -> None:
    """An hour ahead, then led by one an hour behind."""
    async with trio() as cluster:
        for offset_ms in (3_600_000, -3_600_000, 0):
            leader = await cluster.leader()
            leader.clock.offset_ms = offset_ms
            await send(leader, batch(0, b"x", producer=cluster.rng.randbytes(16)))
            await leader.kill()
            await cluster.leader()
            await leader.start()
        await cluster.settled()

        times = [Header.unpack(frame).append_time_ms for frame in cluster.alive[0].frames()]
        assert times == sorted(times)
        cluster.check_equal()


async def test_two_leaders_of_one_term_are_the_loudest_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """It must never be, and if it is, somebody has to know: once in the log, and counted."""
    async with trio() as cluster:
        leader = await cluster.leader()
        follower, third = cluster.followers(leader)
        replica = follower.replica
        await cluster.until(lambda: replica.core.leader_id == leader.replica.replica_id)
        beat = Heartbeat(
            *(replica.core._cluster, GROUP, third.replica.replica_id, replica.replica_id),
            *(third.replica.core.incarnation, replica.core.term, 0, 1),
        )
        for _ in range(2):
            replica.core.receive(beat, now_ms=follower.clock.monotonic_ms())
            follower.driver.process_ready(replica)

        assert follower.driver.statistics()["second_leaders"] == 2
        said = [each for each in caplog.records if "claims to lead term" in each.getMessage()]
        assert [each.levelname for each in said] == ["CRITICAL"]
