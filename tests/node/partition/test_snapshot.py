"""What is kept beside a log is what a replay of the log would give, or it is not used."""

from __future__ import annotations

import asyncio
import random
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from laminar.batch import Header, Kind, build, build_control, stamp
from laminar.batch.header import set_producer
from laminar.log import Log, Storage
from laminar.log.disk.document import Document
from laminar.node.consensus.log_start import LogStartRecord
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.consensus.replica import Replica, initial_frame, replay
from laminar.node.partition import snapshot
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.cursors import CursorChange
from laminar.node.partition.state.derived_state import encode_state
from laminar.node.partition.state.succession import Input, OpenRecord, Output, SealRecord
from raft.values import HardState, Settings
from tests.disks.fault_disk import FaultDisk, FaultFile
from tests.log.histories import open_inline
from tests.node.opened import entry, idle_driver, open_all
from tests.node.trio import CLUSTER, VOTERS

OUTPUT = msgspec.structs.replace(VOTERS, successor_of=7)


DRIVER = cache(idle_driver)


def partition_of(log: Log) -> Partition:
    partition = Partition(topic="t", number=0, driver=DRIVER(), log=log)
    partition.replica = Replica(
        name="t/0",
        cluster=CLUSTER,
        group=b"g" * 16,
        replica_id=VOTERS.voters[0][0],
        incarnation=1,
        log=log,
        machine=partition,
        hard_state=HardState(1, 0),
        committed_index=log.start.index,
        configurations=[(0, VOTERS)],
        settings=Settings(),
        rng=random.Random(1),
        now_ms=0,
        wall_ms=lambda: 0,
    )
    return partition


class Follower:
    """A partition's log and machine, driven as a core would: appends, truncations, commits."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.log = storage.create_log("t-0", 1)
        self.partition = partition_of(self.log)
        self.sequences: dict[int, list[tuple[int, int]]] = {}
        # An output of a change, so that it can be opened; nothing here refuses what it does not take.
        self.append(initial_frame(OUTPUT, created_ms=1), stamped=True)
        self.commit(0)

    def append(self, frame: bytearray, *, stamped: bool = False) -> None:
        log = self.log
        if not stamped:
            stamp(
                frame,
                index=log.last_index + 1,
                term=log.last_term,
                prev_term=log.last_term,
                base_offset=log.next_offset,
                append_time_ms=log.last_append_time_ms + 1,
                committed_index=self.partition.committed_index,
                opens_segment=log.last_index % 4 == 0,
            )
        log.append([bytes(frame)])
        self.partition.appended(Header.unpack(frame), frame)

    def data(self, producer: int) -> None:
        known = [each for each in self.sequences.get(producer, []) if each[0] <= self.log.last_index]
        sequence = known[-1][1] + 1 if known else 0
        self.append(build([b"v" * 50], producer_id=bytes([producer + 1]) * 16, sequence=sequence))
        self.sequences[producer] = [*known, (self.log.last_index, sequence)]

    def keyed(self, key: int) -> None:
        key_id = bytes([key + 1]) * 16
        if self.partition.state.keys.get(key_id) is None:
            frame = build([b"v" * 50])
            set_producer(frame, producer_id=key_id, epoch=0, sequence=key, keyed=True)
            self.append(frame)

    def cursor(self, name: int, position: int | None) -> None:
        change = CursorChange(name=f"c{name}", position=position, changed_ms=1)
        self.append(build_control(Kind.CURSOR, msgspec.msgpack.encode(change)))

    def open(self, change: int) -> None:
        self.append(OpenRecord(change, 2, 0, 9, [Input(0, bytes(16), 7, 1)]).frame())

    def seal(self, change: int) -> None:
        self.append(SealRecord(change, 3, [Output(1, 0, 9, bytes(16))], "strict").frame())

    def configure(self, learner: int) -> None:
        record = ConfigurationRecord(voters=VOTERS.voters, learners=((10 + learner, "d"),))
        self.append(build_control(Kind.CONFIGURATION, record.encoded()))

    def move_start(self) -> None:
        partition, log = self.partition, self.log
        index = partition.committed_index
        if partition.state.start_is_moving or index <= log.start.index + 1:
            return
        row = log.index_entry(index - 1)
        record = LogStartRecord(
            index=index - 1,
            term=row.term,
            offset=row.next_offset,
            time_ms=row.append_time_ms,
            configuration=partition.state.configurations_up_to(1 << 60)[-1][1],
            state=encode_state(partition.state.state()),
        )
        self.append(record.frame())

    def truncate(self, entries: int) -> None:
        index = max(self.log.last_index + 1 - entries, self.partition.committed_index + 1)
        if index <= self.log.last_index:
            self.log.truncate(index)
            self.partition.truncated(index)
            self.sequences = {
                producer: [each for each in known if each[0] < index]
                for producer, known in self.sequences.items()
            }

    def commit(self, behind_end: int) -> None:
        index = self.log.last_index - behind_end
        if index > self.partition.committed_index:
            self.partition.committed(index)

    async def keep(self) -> None:
        await snapshot.SnapshotWriter(self.storage).write(self.partition)


async def replayed(log: Log, known: snapshot.StateSnapshot | None) -> Partition:
    """The machine of a log that was just opened, from its start or behind what is known."""
    partition = partition_of(log)
    index = log.first_index
    if known is not None:
        partition.state.restore(known.state, known.configurations, known.start)
        index = known.index + 1
    while index <= log.last_index:
        frames = await log.read(index, log.last_index, max_bytes=1 << 20)
        replay(frames, partition)
        index += len(frames)
    return partition


def picture(partition: Partition) -> Any:
    return (
        partition.producers.stored(),
        partition.cursors.stored(),
        partition.state.keys.stored(),
        partition.state.succession.stored(),
        partition.state.configurations_up_to(1 << 60)[-1:],
        partition.log.start,
    )


STEPS = st.one_of(
    st.tuples(st.just("data"), st.integers(0, 2)),
    st.tuples(st.just("data"), st.integers(0, 2)),
    st.tuples(st.just("cursor"), st.integers(0, 1), st.one_of(st.none(), st.integers(0, 9))),
    st.tuples(st.just("keyed"), st.integers(0, 3)),
    st.tuples(st.just("configure"), st.integers(0, 3)),
    st.tuples(st.just("open"), st.integers(7, 8)),
    st.tuples(st.just("seal"), st.integers(9, 10)),
    st.tuples(st.just("move_start")),
    st.tuples(st.just("truncate"), st.integers(1, 3)),
    st.tuples(st.just("commit"), st.integers(0, 2)),
    st.tuples(st.just("sync")),
    st.tuples(st.just("keep")),
)


# A configuration that is cut after the document was kept.
CUT_CONFIGURATION: list[Any] = [("data", 0), ("configure", 1), ("sync",), ("commit", 1), ("keep",)]
# A key behind the document, and one in it.
KEPT_KEY: list[Any] = [("keyed", 0), ("sync",), ("commit", 0), ("keep",), ("keyed", 1), ("sync",)]

# What was not committed when the document was kept, and is cut.
CUT_STATE: list[Any] = [
    ("data", 0),
    ("sync",),
    ("commit", 0),
    ("data", 1),
    ("cursor", 0, 7),
    ("keyed", 0),
    ("keep",),
    ("truncate", 3),
    ("sync",),
]


# A seal that is in the document, and one that is cut after the document was kept.
KEPT_SEAL: list[Any] = [("open", 7), ("seal", 9), ("sync",), ("commit", 0), ("keep",)]
CUT_SEAL: list[Any] = [
    *(("data", 0), ("open", 7), ("sync",), ("commit", 0), ("seal", 9), ("keep",)),
    *(("truncate", 1), ("seal", 10), ("sync",)),
]
# The start moves over the open and the seal.
TRIMMED_SEAL: list[Any] = [
    *(("open", 7), ("seal", 9), ("cursor", 0, 7), ("cursor", 0, 8), ("sync",), ("commit", 0)),
    *(("move_start",), ("sync",), ("commit", 0), ("sync",)),
]


@settings(max_examples=150, deadline=None)
@example(KEPT_SEAL, 0)
@example(CUT_SEAL, 0)
@example(TRIMMED_SEAL, 0)
@example(CUT_STATE, 0)
@example(CUT_CONFIGURATION, 0)
@example(KEPT_KEY, 0)
@given(st.lists(STEPS, max_size=40), st.integers(0, 2**32))
def test_pitfall_20_the_state_behind_the_document_equals_a_full_replay(script: list[Any], seed: int) -> None:
    """Whatever was appended, truncated, committed and kept, and wherever the power went."""

    async def main() -> None:
        disk = FaultDisk()
        follower = Follower(open_inline(disk))
        for name, *arguments in script:
            if name == "sync":
                await follower.storage.sync()
            elif name == "keep":
                await follower.keep()
            else:
                getattr(follower, name)(*arguments)
        rng = random.Random(seed)
        disk.crash(rng, keep=rng.choice([0.0, 0.5, 1.0]))
        storage = open_inline(disk)
        log = storage.logs.get(1)
        if log is None or log.last_index == log.start.index:
            return
        known = snapshot.read(log)
        committed = max(log.start.index, known.index if known is not None else 0)
        short = await replayed(log, known)
        full = await replayed(log, None)
        short.committed(committed)
        full.committed(committed)
        assert picture(full) == picture(short)
        # What may still be cut can be rolled back in both alike.
        if log.last_index > committed:
            cut = rng.randint(committed + 1, log.last_index)
            log.truncate(cut)
            short.truncated(cut)
            full.truncated(cut)
            assert picture(full) == picture(short)

    asyncio.run(main())


async def test_a_start_moves_with_its_commit_and_tells_the_configuration() -> None:
    """Entries before it are committed first; whoever reads from it on finds out who the members are."""
    follower = Follower(open_inline(FaultDisk()))
    for _ in range(6):
        follower.data(0)
    follower.configure(4)
    follower.commit(0)
    follower.data(0)
    follower.move_start()
    log, wanted = follower.log, follower.partition.state.configurations_up_to(1 << 60)[-1][1]
    follower.commit(1)
    assert 0 == log.start.index

    frames = await log.read(log.last_index, log.last_index, max_bytes=1)
    assert [(log.last_index, wanted)] == replay(frames, partition_of(log))
    assert ((14, "d"),) == wanted.learners
    follower.commit(0)
    assert 0 < log.start.index


async def kept(disk: FaultDisk, entries: int) -> None:
    follower = Follower(open_inline(disk))
    for number in range(entries):
        follower.data(number % 3)
        follower.cursor(0, number)
    follower.commit(0)
    follower.storage.record_hard_state(1, term=1, vote=0)
    await follower.storage.sync()
    await follower.keep()
    for _ in range(3):
        follower.data(0)
    await follower.storage.sync()
    await follower.storage.close()
    disk.kill()


async def test_a_start_reads_only_what_lies_behind_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """By bytes through the disk's door: three batches of some hundred bytes, of a log of many times that."""
    disk = FaultDisk()
    await kept(disk, 200)
    storage = open_inline(disk)
    log = storage.logs[1]
    tail = sum(log.index_entry(index).size for index in range(log.last_index - 2, log.last_index + 1))
    read_bytes = 0
    for name in ("pread", "pread_nowait"):
        original = getattr(FaultFile, name)

        def counted(file: FaultFile, size: int, position: int, original: Any = original) -> Any:
            nonlocal read_bytes
            data = original(file, size, position)
            if file.path.endswith(".log") and data is not None:
                read_bytes += len(data)
            return data

        monkeypatch.setattr(FaultFile, name, counted)
    shard = await open_all(storage, [entry(1, 1)])
    assert not shard.lost
    partition = shard.partitions[("t", 1)]
    assert 0 < read_bytes <= tail + 3 * 128 < log.size_bytes // 20
    full = await replayed(log, None)
    assert picture(full)[:2] == picture(partition)[:2]
    await storage.close()


@pytest.mark.parametrize("how", ["missing", "rotten", "of another version", "ahead", "of another history"])
async def test_pitfall_20_a_document_that_does_not_fit_is_passed_over(how: str) -> None:
    """Then the log is replayed from its start, and the state is the same."""
    disk = FaultDisk()
    await kept(disk, 10)
    storage = open_inline(disk)
    log = storage.logs[1]
    good = snapshot.read(log)
    assert good is not None and 21 == good.index
    document = Document(disk, log.files.directory, snapshot.NAME)
    files = [f"{log.files.directory}/{each}" for each in disk.list(log.files.directory) if "derived" in each]
    assert 2 == len(files)
    if how == "missing":
        for path in files:
            disk.unlink(path)
    elif how == "rotten":
        for path in files:
            disk.rot(path, 40)
    elif how == "of another version":
        document.write(msgspec.msgpack.encode({"version": snapshot.VERSION + 1, "something": "else"}))
    elif how == "ahead":
        document.write(msgspec.msgpack.encode(msgspec.structs.replace(good, index=log.last_index + 1)))
    else:
        document.write(msgspec.msgpack.encode(msgspec.structs.replace(good, term=good.term + 1)))
    assert snapshot.read(log) is None
    shard = await open_all(storage, [entry(1, 1)])
    expected = await replayed(log, good)
    assert picture(expected)[:2] == picture(shard.partitions[("t", 1)])[:2]
    await storage.close()
