"""Replicas that come up: what cannot be read stays away alone; a catalog never stands still."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from laminar.batch import Header, Kind, build, build_control, stamp
from laminar.log import DamagedRange
from laminar.log.disk.errors import StorageError
from laminar.log.format.manifest import ReplicaEntry
from laminar.node.catalog.group import CatalogGroup
from laminar.node.catalog.local_replica import promises_are_lost
from laminar.node.consensus.peer_repair import EntryReply
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.consensus.replica import initial_frame
from laminar.node.partition.snapshot import snapshot_of
from laminar.node.partition.state.succession import Output, SealRecord
from laminar.node.shard.replicas.replica_moves import ReplicaMover
from laminar.node.shard.replicas.replica_startup import ReplicaOpener
from laminar.node.shard.replicas.work_lists import WorkLists
from membership.catalog import OutcomeUnknown
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import frame_for, open_inline
from tests.node.opened import entry, found_again, open_all
from tests.node.trio import PATIENCE_S, VOTERS


async def test_pitfall_35_a_catalog_that_lost_its_promises_is_not_begun_anew() -> None:
    """Its vote may be older than the newest, or gone; a learner that has just joined has none."""
    storage = open_inline(FaultDisk())
    log = storage.create_log("catalog")
    found = entry(1, log.log_id)

    def is_lost() -> bool:
        return promises_are_lost(storage, found, log)

    assert not is_lost()
    log.recovering = True
    assert is_lost()
    log.append([initial_frame(VOTERS, created_ms=1)])
    assert is_lost(), "entries without a vote"
    storage.record_hard_state(1, term=1, vote=0)
    await storage.sync()
    assert not is_lost()
    log.recovering = False
    storage.lost_hard_states.add(1)
    assert is_lost()
    await storage.close()


async def test_pitfall_35_what_is_missing_unreadable_or_unsure_stays_away_alone() -> None:
    """No log, an emptied one, no vote, a vote that may be older than the newest, a damaged log: none of these
    takes part, and the shard's other replicas serve. One that may have forgotten entries takes part, marked.
    """
    storage = open_inline(FaultDisk())
    entries = []
    for number in range(1, 8):
        log = storage.create_log(f"t-{number}")
        log.append([initial_frame(VOTERS, created_ms=1)])
        storage.record_hard_state(number, term=1, vote=0)
        entries.append(entry(number, log.log_id))
    await storage.sync()
    healthy, no_log, no_vote, unsure, recovering, damaged, emptied = entries
    storage.logs[emptied.log_id] = storage.create_log("t-emptied")
    storage.logs.pop(no_log.log_id)
    storage.hard_states.pop(no_vote.replica_id)
    storage.lost_hard_states.add(unsure.replica_id)
    storage.logs[recovering.log_id].recovering = True

    async def unreadable(*_: object, **__: object) -> list[bytes]:
        raise StorageError("damaged")

    storage.logs[damaged.log_id].read = unreadable  # type: ignore[assignment]

    shard = await open_all(storage, entries)

    assert [no_log, no_vote, unsure, damaged, emptied] == shard.lost
    assert [(healthy.group, False), (recovering.group, True)] == [
        (replica.group, replica.core.recovering) for replica in shard.driven
    ]
    assert [("t", healthy.partition), ("t", recovering.partition)] == list(shard.partitions)
    await storage.close()


async def test_a_command_that_cannot_be_applied_ends_the_controller() -> None:
    """Nothing is applied behind it, and nobody goes on with a catalog that stands still."""
    frame = build_control(Kind.COMMAND, b"no command")
    failures: list[Exception] = []

    async def read(*_: object, **__: object) -> list[bytearray]:
        return [frame]

    log: Any = SimpleNamespace(start=SimpleNamespace(index=0), read=read)
    driver: Any = None
    group = CatalogGroup(
        driver=driver,
        log=log,
        on_applied=lambda: None,
        on_led=lambda leading: None,
        on_failed=failures.append,
    )

    def broken(index: int, command: bytes) -> None:
        raise RuntimeError("not a command")

    group.catalog.apply = broken  # type: ignore[method-assign, assignment]
    group.committed(1)
    async with asyncio.timeout(PATIENCE_S):
        while not failures:  # noqa: ASYNC110  # a list, filled from within
            await asyncio.sleep(0.001)

    assert ["not a command"] == [str(failure) for failure in failures]
    assert 0 == group.applied_index


async def test_a_damaged_replica_that_is_let_go_is_waited_for_no_longer() -> None:
    """Its log may stand for a while yet: looking at it again and again without a pause stops the shard."""
    disk, storage, log = await found_again(b"a" * 300, b"b" * 300)
    disk.rot(log.segment_of(2).file.path, log.index_entry(2).position + 200, 4)
    shard = await open_all(storage, [entry(1, log.log_id)])
    waiting, *_ = [task for task in shard.work if "_start_damaged" in repr(task)]

    shard.repairs.forget(entry(1, log.log_id).group)
    async with asyncio.timeout(PATIENCE_S):
        await waiting

    assert log.log_id in storage.logs and not shard.driven and not shard.lost
    for task in shard.work:
        task.cancel()
    await storage.close()


async def test_a_learner_that_is_let_go_while_it_begins_again_leaves_nothing_behind() -> None:
    """Its group has removed it in the instant in which its log is replaced: it takes part no more, and no log
    stays that no manifest names.
    """
    ended = set()
    for turns in range(40):
        storage = open_inline(FaultDisk())
        log = storage.create_log("t-1")
        record = ConfigurationRecord(voters=((2, "b"), (3, "c")))
        log.append([initial_frame(record, created_ms=1)])
        log.set_recovering(recovering=True, incarnation=1, power_lost=True)
        storage.record_hard_state(1, term=1, vote=0)
        learner = msgspec.structs.replace(entry(1, log.log_id), voters=list(record.voters))
        await storage.sync()
        await storage.write_manifest([learner])
        shard = await open_all(storage, [])
        shard.repairs.keep(learner, log)
        beginning = asyncio.ensure_future(ReplicaOpener(shard)._start_damaged(learner, log, comes_back=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        ended.add(beginning.done())

        def remove_replica(entry: ReplicaEntry, error: StorageError, shard: Any = shard) -> None:
            shard.repairs.forget(entry.group)
            shard.driven.clear()

        shard.remove_replica = remove_replica
        await ReplicaMover(shard, WorkLists(shard))._delete([learner])
        await beginning

        assert not shard.driven and not storage.logs and not storage.manifest.entries, turns
        await storage.close()
    assert ended == {False, True}


@pytest.mark.parametrize("voters", [1, 3])
async def test_a_batch_damaged_at_a_start_keeps_nobody_away(
    voters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sole replica serves all else. One of three waits for the others to give what is missing, then takes
    part without; as it could not tell a retry from news, it neither stands nor takes appends until somebody
    gives it.
    """
    monkeypatch.setattr("laminar.node.shard.replicas.replica_startup.REPAIR_PATIENCE_S", 0.05)
    monkeypatch.setattr("laminar.node.shard.replicas.replica_startup.REPAIR_CHECK_S", 0.01)
    disk, storage, log = await found_again(b"a" * 300, b"b" * 300, b"c" * 300)
    [missing] = await log.read(3, 3, max_bytes=1)
    disk.rot(log.segment_of(3).file.path, log.index_entry(3).position + 200, 4)
    found = entry(1, log.log_id)
    found.voters = found.voters[:voters]

    shard = await open_all(storage, [found])
    assert [] == shard.lost
    assert (voters == 1) == bool(shard.driven)
    async with asyncio.timeout(PATIENCE_S):
        while not shard.driven:  # noqa: ASYNC110  # a list, filled from within
            await asyncio.sleep(0.001)

    assert [3] == [damage.first_index for damage in log.quarantine]
    partition = shard.partitions[("t", 1)]
    assert ([3] if voters > 1 else []) == partition.state.left_out
    assert (voters == 1) == partition.is_whole
    # What goes on without an entry for good says so: the partition's seal may be missing.
    assert (voters == 1) == partition.may_lack_seal
    assert shard.driven[0].core.defers_campaign
    partition.committed(4)
    kept = snapshot_of(partition.log, partition.state)
    assert (voters == 1) == (kept is not None and kept.state.succession.lacks_entries)
    assert [0] == [Header.unpack(each).base_offset for each in await partition.reader.frames(0, max_bytes=1)]
    with pytest.raises(DamagedRange):
        await partition.reader.frames(1, max_bytes=1)
    assert [2] == [Header.unpack(each).base_offset for each in await partition.reader.frames(2, max_bytes=1)]

    async def given(*_: object, **__: object) -> bytes:
        return msgspec.msgpack.encode(EntryReply("held", True, bytes(missing)))

    shard.repairs._call = given
    async with asyncio.timeout(PATIENCE_S):
        while voters > 1 and not (partition.is_whole and not log.quarantine):  # noqa: ASYNC110  # looked at
            await asyncio.sleep(0.001)
    if voters > 1:
        assert [1] == [
            Header.unpack(each).base_offset for each in await partition.reader.frames(1, max_bytes=1)
        ]
        assert (
            not shard.driven[0].core.defers_campaign
            and not partition.may_lack_seal
            and snapshot_of(partition.log, partition.state) is not None
        )
    for task in shard.work:
        task.cancel()
    await storage.close()


async def test_a_replica_whose_seal_is_damaged_votes_and_leads_only_when_it_has_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it the replica would take records behind the final end."""
    monkeypatch.setattr("laminar.node.shard.replicas.replica_startup.REPAIR_PATIENCE_S", 0.05)
    monkeypatch.setattr("laminar.node.shard.replicas.replica_startup.REPAIR_CHECK_S", 0.01)
    disk = FaultDisk()
    storage = open_inline(disk)
    log = storage.create_log("t-1")
    log.append([initial_frame(VOTERS, created_ms=1)])
    log.append([frame_for(log, [b"a" * 300])])
    seal = SealRecord(7, 3, [Output(n, 9 * n, 9, bytes([n]) * 16) for n in range(9)], "strict").frame()
    stamp(
        seal,
        index=3,
        term=log.last_term,
        prev_term=log.last_term,
        base_offset=1,
        append_time_ms=log.last_append_time_ms,
        committed_index=0,
    )
    log.append([bytes(seal)])
    storage.record_hard_state(1, term=1, vote=0)
    await storage.sync()
    await storage.close()
    disk.kill()
    storage = open_inline(disk)
    log = storage.logs[log.log_id]
    disk.rot(log.segment_of(3).file.path, log.index_entry(3).position + 200, 4)

    shard = await open_all(storage, [entry(1, log.log_id)])
    async with asyncio.timeout(PATIENCE_S):
        while not shard.driven:  # noqa: ASYNC110  # a list, filled from within
            await asyncio.sleep(0.001)
    partition = shard.partitions[("t", 1)]
    assert [3] == partition.state.left_out
    assert shard.driven[0].core.defers_campaign and not partition.leads

    async def given(*_: object, **__: object) -> bytes:
        return msgspec.msgpack.encode(EntryReply("held", True, bytes(seal)))

    shard.repairs._call = given
    async with asyncio.timeout(PATIENCE_S):
        while not partition.is_whole:  # noqa: ASYNC110  # looked at
            await asyncio.sleep(0.001)
    assert "sealed" == partition.state.succession.status
    assert not partition.may_lack_seal
    for task in shard.work:
        task.cancel()
    await storage.close()


async def test_pitfall_40_a_replica_knows_what_any_leader_stamped_as_committed() -> None:
    """Also when a later leader, that knew of less, stamped the last entry. The way back of the producers'
    table ends there: were less known to be committed, entries could be cut whose producers stay in the table.
    """
    storage = open_inline(FaultDisk())
    log = storage.create_log("t-1")
    log.append([initial_frame(VOTERS, created_ms=1)])
    for term, committed_index in ((2, 1), (2, 2), (2, 3), (3, 1)):
        frame = build([b"x"], producer_id=b"p" * 16, producer_epoch=0, sequence=log.last_index - 1)
        stamp(
            frame,
            index=log.last_index + 1,
            term=term,
            prev_term=log.last_term,
            base_offset=log.next_offset,
            append_time_ms=log.last_append_time_ms,
            committed_index=committed_index,
            opens_segment=False,
        )
        log.append([frame])
    storage.record_hard_state(1, term=3, vote=0)
    await storage.sync()

    shard = await open_all(storage, [entry(1, log.log_id)])

    (partition,) = shard.partitions.values()
    assert 3 == partition.state.stamped_index == partition.committed_index
    await storage.close()


async def test_a_catalog_that_stops_tells_those_whose_commands_are_on_their_way() -> None:
    """Other replicas may hold such a command and commit it: nobody here can tell, nobody waits for ever."""
    storage = open_inline(FaultDisk())
    log = storage.create_log("catalog")
    log.append([initial_frame(VOTERS, created_ms=1)])
    driver: Any = SimpleNamespace(propose=lambda replica, frame: (2, 1, 0))
    failures: list[Exception] = []
    group = CatalogGroup(
        driver=driver,
        log=log,
        on_applied=lambda: None,
        on_led=lambda leading: None,
        on_failed=failures.append,
    )
    core = SimpleNamespace(is_leader=True, term=1)
    group.replica = SimpleNamespace(core=core, log=log, leader_node=None)  # type: ignore[assignment]
    proposed = asyncio.ensure_future(group.propose(b"a command"))
    await asyncio.sleep(0)

    group.failed(StorageError("its disk"))

    async with asyncio.timeout(60):
        with pytest.raises(OutcomeUnknown):
            await proposed
    assert 1 == len(failures)
    await storage.close()


async def test_a_term_out_of_range_keeps_its_replica_away_by_name() -> None:
    """It was durable before numbers had a limit; counted up, it fits no message: its process would end, again
    at every start.
    """
    storage = open_inline(FaultDisk())
    entries = []
    for number, term in ((1, 2**64 - 1), (2, 1)):
        log = storage.create_log(f"t-{number}")
        log.append([initial_frame(VOTERS, created_ms=1)])
        storage.record_hard_state(number, term=term, vote=0)
        entries.append(entry(number, log.log_id))
    await storage.sync()

    shard = await open_all(storage, entries)

    assert [2] == [replica.replica_id for replica in shard.driven]
    assert [] == shard.lost and "forged message" in shard.failed[1][1]
    await storage.close()
