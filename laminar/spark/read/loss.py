"""Data loss: records that are gone before a query read them.

A loss is an error, or with ``failOnDataLoss=false`` a warning, so that none is silent. No I/O but log lines.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from laminar.spark.read.offsets import Ids, Offset, Partition, Positions

log = logging.getLogger(__name__)

_GOES_ON = "With the option failOnDataLoss=false the query continues with the records that are left"


class DataLoss(ValueError):
    """Records that the query has not read are gone."""


def retention_loss(what: Sequence[str], *, fail: bool) -> None:
    """Report that retention trimmed records before they were read. `what` describes each range of them.

    Raises:
        DataLoss: with `fail`; without it a warning is logged.
    """
    _report(f"retention trimmed records before they were read: {', '.join(what)}", fail=fail)


def partition_loss(what: Sequence[str], *, fail: bool) -> None:
    """Report partitions that were deleted, created again or shortened. `what` describes each of them.

    Raises:
        DataLoss: with `fail`; without it a warning is logged.
    """
    _report(f"records may be gone before they were read: {'; '.join(what)}", fail=fail)


def _report(message: str, *, fail: bool) -> None:
    if fail:
        raise DataLoss(f"{message}. {_GOES_ON}.")
    log.warning("%s. The query continues with the records that are left: failOnDataLoss is false.", message)


def positions_now(
    read: Offset,
    ids: Ids,
    ends: Mapping[Partition, int],
    *,
    left_out: Mapping[Partition, int],
    confirmed: Mapping[Partition, int],
    fail: bool,
    final: Mapping[Partition, int] | None = None,
) -> Positions:
    """Return the offsets at which a query that has read up to `read` continues, by present partition (`ids`).

    A partition that has another id now continues at 0. A partition that is not in `ids` is left out of the
    result. A partition whose `confirmed` end is below what was read continues at that end. Each of these is
    reported as a loss, but for a partition that was read to its end, and that the options no longer name, or
    that has ended (at its offset in `final`) and is reclaimed. `left_out` has the ends of the partitions that
    the options no longer name. `ends` is for messages only.

    Raises:
        DataLoss: with `fail`, for any such loss.
    """
    found: Positions = {}
    lost: list[str] = []
    for partition, offset in sorted(read.positions.items()):
        topic, number = partition
        was = f"{topic}/{number} was read to {offset}"
        id_ = ids.get(partition)
        if id_ is not None and id_ == read.ids.get(partition):
            end = confirmed.get(partition, offset)
            if end < offset:
                lost.append(f"{was} and ends at {end}")
            found[partition] = min(end, offset)
        elif id_ is not None:
            there = f"{ends[partition]} records" if partition in ends else "an unknown number of records"
            lost.append(f"{was}, was deleted and created again: the new one has {there}")
            found[partition] = 0
        else:
            end_there = left_out.get(partition)
            ended = (final or {}).get(partition)
            if ended is not None and end_there is None:
                if ended > offset:
                    lost.append(f"{was}, ended at {ended} and is reclaimed")
            elif end_there is None:
                lost.append(f"{was} and is deleted: how many records came after that is unknown")
            elif end_there > offset:
                lost.append(f"{was} and ends at {end_there}, and the options no longer name it")
    if lost:
        partition_loss(lost, fail=fail)
    return found
