"""Records that a query has not read and never will: an error, or what ``failOnDataLoss=false`` lets pass.

Pure but for the log: what is let pass is a warning, so that nothing goes in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from laminar.spark.read.offsets import Ids, Offset, Partition, Positions

log = logging.getLogger(__name__)

_GOES_ON = "With the option failOnDataLoss=false the query goes on with what is there"


class DataLoss(ValueError):
    """Records that the query has not read are gone."""


def retention_loss(what: Sequence[str], *, fail: bool) -> None:
    """Retention took `what` before it was read. Raises `DataLoss` if the query is to `fail`, else warns."""
    _tell(f"records are gone before they were read: {', '.join(what)}. Retention was faster", fail=fail)


def partition_loss(what: Sequence[str], *, fail: bool) -> None:
    """Partitions are not what was read so far. Raises `DataLoss` if the query is to `fail`, else warns."""
    _tell(f"records may be gone before they were read: {'; '.join(what)}", fail=fail)


def _tell(message: str, *, fail: bool) -> None:
    if fail:
        raise DataLoss(f"{message}. {_GOES_ON}.")
    log.warning("%s. The query goes on with what is there: failOnDataLoss is false.", message)


def settle(
    read: Offset,
    ids: Ids,
    ends: Mapping[Partition, int],
    *,
    left_out: Mapping[Partition, int],
    confirmed: Mapping[Partition, int],
    fail: bool,
) -> Positions:
    """Where a query goes on that has `read` so far, in the partitions that are there now: `ids`.

    A partition of another id begins at 0, one that is gone is left out, and one whose `confirmed` end lies
    before what was read goes on there. Each of these is a loss, which `partition_loss` tells: but where all
    of a partition was read that the options do not name any more: `left_out` has the ends of such. `ends` are
    told for people.
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
            there = f"{ends[partition]} records" if partition in ends else "nobody knows just now what"
            lost.append(f"{was}, was deleted and made anew: in the new one there are {there}")
            found[partition] = 0
        else:
            end_there = left_out.get(partition)
            if end_there is None:
                lost.append(f"{was} and is deleted: nobody knows how many records came after that")
            elif end_there > offset:
                lost.append(f"{was} and ends at {end_there}, and the options do not name it any more")
    if lost:
        partition_loss(lost, fail=fail)
    return found
