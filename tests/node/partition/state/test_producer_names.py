"""Names of producers, in the table of a coordinator: bounded, and a function of the log."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.batch import Header, Kind, build_control
from laminar.node.partition.state import sinks as module
from laminar.node.partition.state.sinks import Sink, SinkChange, Sinks
from laminar.node.transactions.coordinator import Coordinator, id_of, id_of_name
from tests.node.alone import lone_partition
from tests.node.entries import stamped

NOBODY: Any = None


def put(table: Sinks, index: int, name: str, *, producer: bytes = b"p" * 16, time_ms: int = 1000) -> None:
    """A coordinator's entry `index`: a producer took `name`, or a sink began."""
    sink_id = id_of_name(name) if producer else id_of(name)
    frame = build_control(
        Kind.SINK, msgspec.msgpack.encode(SinkChange(sink_id, Sink(name, index, producer=producer)))
    )
    stamped(frame, index, base_offset=0, time_ms=time_ms)
    table.appended(Header.unpack(frame), frame)


def names(table: Sinks) -> set[str]:
    return {entry.sink.name for entry in table.stored()}


def test_of_too_many_names_the_one_not_taken_for_longest_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sinks are none of them; a truncation brings back what it forgot."""
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    table = Sinks()
    put(table, 1, "sink", producer=b"", time_ms=1)
    put(table, 2, "a", time_ms=2)
    put(table, 3, "b", time_ms=3)
    put(table, 4, "a", time_ms=4)
    assert {"sink", "a", "b"} == names(table)
    put(table, 5, "c", time_ms=5)
    assert {"sink", "a", "c"} == names(table)

    table.truncated(5)
    assert {"sink", "a", "b"} == names(table)
    again = Sinks()
    again.restore(table.stored())
    put(table, 5, "c", time_ms=5)
    put(again, 5, "c", time_ms=5)
    assert table.stored() == again.stored(), "a replica that read a document forgets the same"


async def test_a_name_keeps_its_id_and_gets_another_epoch_over_restarts(tmp_path: Path) -> None:
    """The id is what the first of them brought along."""
    epochs = []
    for producer in (b"1" * 16, b"2" * 16):
        async with lone_partition(tmp_path) as partition:
            await partition.reader.confirmed_end()
            coordinator = Coordinator(partition, NOBODY, spawn=asyncio.ensure_future)
            for _ in range(2):
                taken = await coordinator.take_name(id_of_name("copier"), "copier", producer)
                assert b"1" * 16 == taken.producer
                epochs.append(taken.epoch)
    assert [1, 2, 3, 4] == epochs
