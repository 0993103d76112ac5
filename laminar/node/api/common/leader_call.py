"""Steps that a partition's leader carries out, wherever it is: here, or at the shard that it is asked of.

A leader that proves to be none any more is looked for again, as often as `ATTEMPTS`, also when it is cut off
and says nothing while another leads; so a step is one that may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from laminar.http.api.problems import Problem
from laminar.node.api.common.leader_lookup import Locator, Where
from laminar.node.api.common.services import ShardServices

if TYPE_CHECKING:
    from laminar.node.partition.partition import Partition

T = TypeVar("T")

ATTEMPTS = 20
RETRY_S = 0.05
# Each may have taken as long as a request may.
MOST_UNKNOWN = 2


def led_here(services: ShardServices, topic: str, number: int) -> Partition:
    """The partition, if this shard leads it. Raises 503 `not_leader`."""
    partition = services.partitions.get((topic, number))
    if partition is None or not partition.leads:
        raise Problem("not_leader", f"{topic}/{number} is not led here", outcome="not_applied")
    return partition


async def at_leader(
    services: ShardServices,
    locator: Locator,
    topic: str,
    number: int,
    *,
    here: Callable[[Partition], Awaitable[T]],
    there: Callable[[Where], Coroutine[Any, Any, T]],
) -> T:
    """What `here` says of the partition if this shard leads it, else what `there` says of its leader."""
    unknown = 0
    for attempt in range(ATTEMPTS):
        where = await locator.leader(topic, number)
        try:
            partition = services.partitions.get((topic, number))
            if partition is not None and partition.leads:
                return await here(partition)
            return await locator.while_it_leads(where, topic, number, there(where))
        except Problem as problem:
            # Whoever is asked next does not begin with one that did not answer.
            locator.forget(topic, number)
            unknown += problem.outcome == "unknown"
            again = ("not_leader", "no_leader", "outcome_unknown")
            if problem.code not in again or attempt == ATTEMPTS - 1 or unknown > MOST_UNKNOWN:
                if unknown:
                    problem.outcome = "unknown"  # what an earlier try did is not known
                raise
        await asyncio.sleep(RETRY_S)
    raise AssertionError("the last attempt returns or raises")
