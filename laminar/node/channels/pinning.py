"""Check which records a batch of a sink may pin (reserve): those that are out under the deliveries it names.

The reasons are explained with the table (`laminar.node.partition.state.pins`).
`laminar.node.channels.delivery` proposes the entries, and updates the queues.
"""

from __future__ import annotations

from collections.abc import Iterable

from laminar.http.api.problems import Problem
from laminar.node.partition.state.channel_changes import runs_of, spaced_runs
from laminar.node.partition.state.channels import Channels
from laminar.node.partition.state.pins import PartAcks, Pinned
from laminar.node.partition.state.staged_batches import BatchKey
from laminar.wire.channels import Named, token


def wanted_of(table: Channels, batch: BatchKey, acks: Iterable[PartAcks]) -> list[Pinned]:
    """Return the changes that pin (reserve) these records for a batch; none if it has pinned them already.

    Raises:
        Problem: 409 `late` when one of them is not out under its delivery, as of the log's end; 404
            `no_such_channel`; 409 `in_progress` when another batch has pinned one, or the batch has pinned
            others under this epoch.
    """
    found: dict[int, set[int]] = {}
    pinned = again = 0
    for each in acks:
        if each.channel == 0:
            raise Problem("no_such_channel", "there is no such channel", field="acks", outcome="not_applied")
        channel = table.by_id.get(each.channel)
        offsets = found.setdefault(each.channel, set())
        for named in each.named:
            for offset in range(named.first, named.end):
                out = None if channel is None else channel.out.get(offset)
                if channel is None or out is None or out.delivery != named.delivery:
                    raise _late(named, offset)
                held = channel.pins.get(offset)
                if held is not None and held != batch:
                    raise _pinned(named, offset)
                if offset not in offsets:
                    offsets.add(offset)
                    pinned += 1
                    again += held is not None
    before = sum(map(len, table.pinned(batch).values()))
    if batch in table.pins and not pinned == again == before:
        # The coordinator may have decided with these pins: only a newer epoch may pin other records.
        raise Problem(
            "in_progress",
            "other acknowledgements of this batch are being committed in this epoch",
            field="acks",
            value=pinned,
            limit=before,
            outcome="not_applied",
        )
    if batch in table.pins:
        return []
    return [
        Pinned(channel, *batch, runs=spaced_runs(runs_of(sorted(offsets))))
        for channel, offsets in sorted(found.items())
        if offsets
    ]


def others_of(table: Channels, batch: BatchKey, acks: Iterable[PartAcks]) -> set[BatchKey]:
    """Return the other batches of the same sink that have pinned any of these records."""
    found: set[BatchKey] = set()
    for each in acks:
        channel = table.by_id.get(each.channel)
        pins = {} if channel is None else channel.pins
        for named in each.named:
            found.update(pins[offset] for offset in range(named.first, named.end) if offset in pins)
    return {other for other in found if other[0] == batch[0] and other != batch}


def _late(named: Named, offset: int) -> Problem:
    return Problem(
        "late",
        "a job that this batch acknowledges is not out under its delivery any more",
        field="acks",
        value=token(named.partition, offset, named.delivery),
        outcome="not_applied",
    )


def _pinned(named: Named, offset: int) -> Problem:
    return Problem(
        "in_progress",
        "another batch is acknowledging this job",
        field="acks",
        value=token(named.partition, offset, named.delivery),
        outcome="not_applied",
    )
