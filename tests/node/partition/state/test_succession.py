"""What a partition succeeds and whether it has ended: the two entries, and the table that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import BatchError, Header, Kind, build, build_control, stamp
from laminar.batch.header import HEADER_SIZE
from laminar.log import RealDisk, Storage
from laminar.log.tools.inspection import inspect
from laminar.log.tools.reindexing import reindex
from laminar.log.tools.verification import verify
from laminar.node.consensus.raft_wire import ConfigurationRecord, configuration_record
from laminar.node.consensus.replica import initial_frame
from laminar.node.partition.state.delayed_records import Added, Sent, delayed_entry
from laminar.node.partition.state.derived_state import DerivedState, decode_state, encode_state
from laminar.node.partition.state.staging_entries import PrepareOperation, PrepareRecord
from laminar.node.partition.state.state import PartitionState
from laminar.node.partition.state.succession import (
    Input,
    OpenRecord,
    Output,
    SealRecord,
    StoredSuccession,
    Succession,
    open_record,
    seal_record,
)

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
SEAL = SealRecord(7, 3, [Output(4, 100, 50, A), Output(5, 150, 10, B)], "strict")
OPEN = OpenRecord(7, 3, 100, 50, [Input(1, A, 812, 5), Input(2, B, 0, 6)])
VOTERS = ConfigurationRecord(voters=((1, "a"), (2, "b")), learners=((3, "c"),), abandoned=(4,))


def stamped(frame: bytearray, index: int, *, offset: int = 0, committed_index: int = 0) -> bytearray:
    stamp(
        frame,
        index=index,
        term=2,
        prev_term=2,
        base_offset=offset,
        append_time_ms=1000 + index,
        committed_index=committed_index,
    )
    return frame


def put(state: PartitionState, frame: bytearray) -> None:
    state.appended(Header.unpack(frame), frame)


# -- the entries -----------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written_and_takes_no_offset() -> None:
    """Count 0: what an older reader of batches looks for records in, it passes over."""
    sealed, opened = SEAL.frame(), OPEN.frame()

    assert (SEAL, OPEN) == (seal_record(sealed), open_record(opened))
    assert [(Kind.SEAL, 0), (Kind.OPEN, 0)] == [
        (each.kind, each.count) for each in (Header.unpack(sealed), Header.unpack(opened))
    ]
    assert (7, 12) == (Kind.SEAL, Kind.OPEN), "these numbers are in logs"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"change_id": 0}, "$[0]"),
        ({"version": -1}, "$[1]"),
        ({"outputs": []}, "$[2]"),
        ({"outputs": [Output(n, n, 1, n.to_bytes(16, "big")) for n in range(4097)]}, "$[2]"),
        ({"outputs": [Output(4, 100, 0, A)]}, "$[2][0][2]"),
        ({"outputs": [Output(4, 65_536, 1, A)]}, "$[2][0][1]"),
        ({"outputs": [Output(4, 100, 50, b"short")]}, "$[2][0][3]"),
        ({"outputs": [Output(4, 100, 50, A), Output(4, 150, 10, B)]}, "the same partition"),
        ({"outputs": [Output(4, 100, 50, A), Output(5, 150, 10, A)]}, "the same partition"),
        ({"outputs": [Output(4, 100, 50, A), Output(5, 151, 10, B)]}, "output 5: first is 151, not 150"),
        ({"outputs": [Output(4, 65_000, 537, A)]}, "65537"),
        ({"order": "loose"}, "$[3]"),
    ],
)
def test_a_seal_that_says_what_cannot_be_is_named(changed: dict[str, Any], said: str) -> None:
    """By the one who would propose it, and by who reads it."""
    wrong = msgspec.structs.replace(SEAL, **changed)

    with pytest.raises(BatchError) as proposed:
        wrong.frame()
    with pytest.raises(BatchError) as read:
        seal_record(build_control(Kind.SEAL, msgspec.msgpack.encode(wrong)))
    for error in (proposed.value, read.value):
        assert "malformed" == error.code and "seal entry" in str(error) and said in str(error)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"change_id": 0}, "$[0]"),
        ({"size": 65_537}, "$[3]"),
        ({"first": 65_500, "size": 37}, "65537"),
        ({"inputs": [Input(1, A, -1, 5)]}, "$[4][0][2]"),
        ({"inputs": [Input(1, A, 1, 1 << 62)]}, "$[4][0][3]"),
        ({"inputs": [Input(1, A, 1, 5), Input(1, B, 1, 5)]}, "the same partition"),
        ({"inputs": [Input(1, A, 1, 5), Input(2, A, 1, 5)]}, "the same partition"),
    ],
)
def test_an_open_that_says_what_cannot_be_is_named(changed: dict[str, Any], said: str) -> None:
    """As a seal is."""
    wrong = msgspec.structs.replace(OPEN, **changed)

    with pytest.raises(BatchError) as proposed:
        wrong.frame()
    assert "malformed" == proposed.value.code and said in str(proposed.value)


@given(st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_a_record_is_read_whole_or_not_at_all(cut: int, more: bytes) -> None:
    """Cut anywhere, or with bytes after it: an error of the batch, never another exception."""
    for record, kind in ((SEAL, Kind.SEAL), (OPEN, Kind.OPEN)):
        read = seal_record if kind is Kind.SEAL else open_record
        payload = msgspec.msgpack.encode(record)
        for bad in (payload[: min(cut, len(payload) - 1)], payload + more):
            with pytest.raises(BatchError):
                read(build_control(kind, bad))


@given(st.binary(max_size=80))
def test_no_bytes_are_worse_than_malformed(payload: bytes) -> None:
    """Whatever a log holds under an intact checksum."""
    for kind, read in ((Kind.SEAL, seal_record), (Kind.OPEN, open_record)):
        try:
            read(build_control(kind, payload))
        except BatchError as error:
            assert "malformed" == error.code


# -- older programs --------------------------------------------------------------------------


class OldConfiguration(msgspec.Struct, frozen=True, array_like=True):
    """As code version 1 has it."""

    voters: tuple[tuple[int, str], ...]
    learners: tuple[tuple[int, str], ...] = ()
    abandoned: tuple[int, ...] = ()


def test_entry_one_has_the_bytes_that_an_older_program_writes() -> None:
    """The replicas of a new group may run both, and each makes the entry itself."""
    old = msgspec.msgpack.encode(OldConfiguration(VOTERS.voters, VOTERS.learners, VOTERS.abandoned))

    assert old == VOTERS.encoded() == bytes(initial_frame(VOTERS, created_ms=1)[HEADER_SIZE:])
    marked = msgspec.structs.replace(VOTERS, successor_of=7)
    assert marked == configuration_record(marked.encoded()) and VOTERS == configuration_record(old)
    # One that reads the mark all the same, in a table of a newer program, passes over it.
    assert msgspec.msgpack.decode(old, type=OldConfiguration) == msgspec.msgpack.decode(
        marked.encoded(), type=OldConfiguration
    )


def test_a_stored_state_of_an_older_program_has_no_change() -> None:
    """And one of this program, of a partition that never had a change, is read by it."""
    new = encode_state(DerivedState(producers=[], cursors=[]))
    old = msgspec.msgpack.encode(msgspec.msgpack.decode(new)[:6])

    assert StoredSuccession() == decode_state(old).succession == decode_state(new).succession
    state = PartitionState(0)
    state._restore_tables(decode_state(old))
    assert ("open", True) == (state.succession.status, state.succession.takes_records)


# -- the table -------------------------------------------------------------------------------


def test_an_output_waits_until_it_is_opened_and_ends_with_its_seal() -> None:
    """Entry 1 names the change; configurations after it do not, and change nothing."""
    state = PartitionState(0)
    seen = [state.succession.status]
    put(state, initial_frame(msgspec.structs.replace(VOTERS, successor_of=7), created_ms=1))
    seen.append(state.succession.status)
    put(state, stamped(build_control(Kind.CONFIGURATION, VOTERS.encoded()), 2))
    seen.append(state.succession.status)
    put(state, stamped(OPEN.frame(), 3))
    seen.append(state.succession.status)
    put(state, stamped(SEAL.frame(), 4, offset=9))
    seen.append(state.succession.status)

    assert ["open", "waiting", "waiting", "open", "sealed"] == seen
    succession = state.succession
    assert succession.opened is not None and (3, 1003, OPEN) == msgspec.structs.astuple(succession.opened)
    assert succession.sealed is not None
    assert (4, 2, 9, 1004, SEAL) == msgspec.structs.astuple(succession.sealed)
    assert state.committed_seal is None, "appended, and not committed"
    state.committed(3)
    assert state.committed_seal is None
    state.committed(4)
    assert succession.sealed is state.committed_seal


def test_of_two_seals_the_first_counts() -> None:
    """Its end is final; a second one says nothing about records."""
    state = PartitionState(0)
    put(state, stamped(SEAL.frame(), 4, offset=9))
    first = state.succession.sealed
    put(state, stamped(msgspec.structs.replace(SEAL, change_id=8).frame(), 5, offset=9))

    assert first == state.succession.sealed
    state.truncated(5)
    assert first == state.succession.sealed


@given(st.lists(st.sampled_from(["seal", "open", "data"]), max_size=12), st.data())
def test_what_is_rolled_back_and_stored_is_what_the_entries_left_would_give(
    kinds: list[str], data: st.DataObject
) -> None:
    """A truncation, and the table as of any entry that is not committed."""
    frames = [initial_frame(msgspec.structs.replace(VOTERS, successor_of=7), created_ms=1)]
    for index, kind in enumerate(kinds, start=2):
        frame = build([b"x"]) if kind == "data" else (SEAL if kind == "seal" else OPEN).frame()
        frames.append(stamped(frame, index, offset=index))
    tables = []
    state = PartitionState(0)
    for frame in frames:
        put(state, frame)
        tables.append(state.succession.stored())
    committed = data.draw(st.integers(0, len(frames)))
    state.committed(committed)
    cut = data.draw(st.integers(committed, len(frames)))

    if cut:
        assert tables[cut - 1] == state.succession.stored_at(cut) == state.state_at(cut).succession
    state.truncated(cut + 1)
    expected = tables[cut - 1] if cut else StoredSuccession()
    assert expected == state.succession.stored()
    again = Succession()
    again.restore(expected)
    assert (again.status, again.takes_records) == (state.succession.status, again.status == "open")


def test_a_partition_that_takes_no_records_takes_what_adds_none() -> None:
    """What moves its members, its start and its cursors goes on, and sinks that are deleted are forgotten."""

    def prepare(operation: PrepareOperation) -> bytearray:
        record = PrepareRecord(A, 1, 1, operation)
        return build_control(Kind.PREPARE, msgspec.msgpack.encode(record))

    special = (Kind.DATA, Kind.PREPARE, Kind.DELAYED)
    frames = {kind.name: build_control(kind) for kind in Kind if kind not in special}
    frames |= {
        "DELAYED taken": delayed_entry(Added(0, 1, 5, 5, b"")),
        "DELAYED sent": delayed_entry(Sent(1, 1, 0, [])),
    }
    frames |= {f"PREPARE {each.name}": prepare(each) for each in PrepareOperation}
    frames |= {"DATA": build([b"x"]), "SEAL": SEAL.frame(), "OPEN": OPEN.frame()}
    state = PartitionState(0)
    assert set(frames) == {name for name, frame in frames.items() if state.succession.takes(frame)}

    put(state, initial_frame(msgspec.structs.replace(VOTERS, successor_of=7), created_ms=1))
    none = {"NOOP", "CONFIGURATION", "LOG_START", "CURSOR", "CHANNEL"}
    none |= {"PREPARE DROP", "PREPARE FORGET", "PREPARE FORGET_PUBLISHED"}
    assert none | {"OPEN"} == {name for name, frame in frames.items() if state.succession.takes(frame)}
    put(state, stamped(OPEN.frame(), 2))
    put(state, stamped(SEAL.frame(), 3))
    assert none | {"DELAYED sent"} == {
        name for name, frame in frames.items() if state.succession.takes(frame)
    }


async def test_the_tools_for_logs_read_both_kinds(tmp_path: Path) -> None:
    """A log that ends with a seal has no findings, and its index is made again from it."""
    storage = Storage.open(RealDisk(), str(tmp_path / "store"), str(tmp_path / "logs"))
    log = storage.create_log("t-0")
    for frame in (initial_frame(VOTERS, created_ms=1), OPEN.frame(), build([b"a", b"b"]), SEAL.frame()):
        index = log.last_index + 1
        if index > 1:
            stamp(
                frame,
                index=index,
                term=1,
                prev_term=1,
                base_offset=log.next_offset,
                append_time_ms=index,
                committed_index=0,
            )
        log.append([frame])
    await storage.sync()
    await storage.close()
    folder = str(tmp_path)

    assert [] == verify(folder).findings
    (shown,) = inspect(folder)["logs"]
    assert (1, 4, 2) == (shown["first_index"], shown["last_index"], shown["end_offset"])
    (again,) = reindex(folder)
    assert (4, 0, False) == (again.rows, again.unknown, again.changed)
