"""The changes in `channel` entries of a log, and their bytes (docs/format.md).

A `channel` entry holds changes, which are applied in order (`laminar.node.partition.state.channels`). Offsets
in them are ascending, and stored as distances: as runs if most are consecutive (`spaced_runs`), else one by
one (`spaced`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from laminar.batch import BatchError, Buffer, Kind, body_of, build_control
from laminar.batch.header import Flag
from laminar.node.partition.state.pins import Pinned, PinsEnded
from laminar.wire.channels import ChannelSettings

TIME_OUT: Final = "time-out"
"""The `reason` text of a delivery that failed because its time ran out."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Change: open a channel, which gives out the records from offset `next` up to `until` (None: no end).

    If the channel is open already and `version` is higher, only its settings are replaced.
    """

    channel: int
    name: str
    version: int
    settings: ChannelSettings
    next: int
    until: int | None = None


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Change: close a channel and forget all its state."""

    channel: int


class GivenOut(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Change: give out records, and move the channel's `next` forward.

    `fresh` are records given out for the first time, as runs (`spaced_runs`). `again` are records that were
    aside, as distances (`spaced`). In a channel that keeps the order of keys, `keys` has the key hash of each
    fresh record, and `busy` lists the records before `next` that must wait for an earlier one of their key:
    distance, hash, distance, hash, and so on. A record below `next` that is not listed is never given out.
    """

    channel: int
    next: int
    timeout_ms: int
    fresh: list[int] = []
    again: list[int] = []
    keys: list[int] = []
    busy: list[int] = []


class Acknowledged(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Change: records that are out or aside are done; `runs` are their offsets (`spaced_runs`)."""

    channel: int
    runs: list[int]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Change: the deliveries of records that are out have failed, so put these records aside.

    `items` has three values per record: the distance from the record before (`spaced`), the delay in ms from
    the append time of this entry (-1: the record is dead), and whether the attempt counts (1 or 0).
    """

    channel: int
    items: list[int]
    reason: str = ""


class Sought(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Change: move the channel to offset `next`; all records from there on are given out again.

    Records before `next` that are out are put aside, due at once, and their attempt does not count. With
    `drop` they are done instead, and so are the records aside before `next`, except dead ones.
    """

    channel: int
    next: int
    drop: bool = False


class Retried(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Change: set when records that are aside are due; dead ones start again with attempt 1.

    `items` has two values per record: the distance from the record before (`spaced`), and the delay in ms.
    """

    channel: int
    items: list[int]


class Copied(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Change: this entry contains copies of open records: `frame` is a batch of them, ordered as `offsets`.

    `channel` is 0, because the copies serve all channels. `offsets` are those of the records (`spaced`),
    `times` their append times in ms, and `size` the approximate size of each in bytes. The entry has no other
    change.
    """

    channel: int
    offsets: list[int]
    times: list[int]
    size: int
    frame: bytes


class Deleted(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Change: an operator deletes the records before offset `before`; forget the open ones that have copies.

    Open records are those that some channel is not done with.

    `channel` is 0, because it applies to all channels. Open records without copies are forgotten by the
    `log_start` entry that follows.
    """

    channel: int
    before: int


Change: TypeAlias = (
    Opened
    | Closed
    | GivenOut
    | Acknowledged
    | Failed
    | Sought
    | Retried
    | Copied
    | Deleted
    | Pinned
    | PinsEnded
)

_decoder = msgspec.msgpack.Decoder(list[Change])


def channel_entry(changes: Sequence[Change], *, synced: bool = False) -> bytearray:
    """Return the unstamped batch of a `channel` entry; with `synced` it counts only once it is synced."""
    return build_control(Kind.CHANNEL, msgspec.msgpack.encode(changes), flags=Flag.SYNCED if synced else 0)


def channel_changes(frame: Buffer) -> list[Change]:
    """Return the changes in the frame of a `channel` entry. Raises `BatchError` if it is malformed."""
    try:
        return _decoder.decode(body_of(frame))
    except msgspec.DecodeError as error:
        raise BatchError("malformed", f"channel entry: {error}", field="body") from error


def runs_of(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending offsets as runs of consecutive ones: (first offset, count) of each run."""
    runs: list[tuple[int, int]] = []
    first = count = 0
    for offset in offsets:
        if count and offset == first + count:
            count += 1
            continue
        if count:
            runs.append((first, count))
        first, count = offset, 1
    if count:
        runs.append((first, count))
    return runs


def spaced_runs(runs: Iterable[tuple[int, int]]) -> list[int]:
    """Encode ascending runs as a flat list: distance from the end of the run before, count, and so on."""
    found: list[int] = []
    end = 0
    for first, count in runs:
        found += (first - end, count)
        end = first + count
    return found


def runs_in(spaced: Sequence[int]) -> Iterator[range]:
    """Decode the list of `spaced_runs`: yield each run as a range of offsets."""
    end = 0
    for distance, count in zip(spaced[::2], spaced[1::2], strict=True):
        yield range(end + distance, end + distance + count)
        end += distance + count


def copied_offsets(change: Copied) -> list[int]:
    """Return the offsets of the records that a `Copied` change copies, in the order of its batch."""
    return list(offsets_in(change.offsets))


def spaced(offsets: Iterable[int]) -> list[int]:
    """Encode ascending offsets as distances: each from the offset before, the first from 0."""
    found: list[int] = []
    last = 0
    for offset in offsets:
        found.append(offset - last)
        last = offset
    return found


def offsets_in(distances: Iterable[int]) -> Iterator[int]:
    """Decode the distances of `spaced`: yield the offsets."""
    offset = 0
    for distance in distances:
        offset += distance
        yield offset
