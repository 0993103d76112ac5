"""How many new producers and idempotency keys a principal brings into a partition that is led here.

A partition remembers 10,000 of each, and refuses a new one rather than forget one of the last hour. So a
principal that brings ever new ones would keep all others from appending with theirs. Its limit `producers` is
how many it may bring in an hour. It is in this leader's memory alone: a new leader counts from the beginning.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

from laminar.batch import NO_PRODUCER, Header
from laminar.batch.header import Flag
from laminar.http.api.problems import over_limit
from laminar.node.access.meters import Rate
from laminar.node.api.common.services import ShardServices
from laminar.node.partition.partition import Partition

HOUR_MS: Final = 3_600_000
LONGEST_WAIT_MS: Final = 60_000


class NewIds:
    """The new ids of the principals that have such a limit."""

    def __init__(self, services: ShardServices) -> None:
        self._services = services
        self._rates: WeakKeyDictionary[Partition, dict[str, Rate]] = WeakKeyDictionary()

    def count_batch(self, partition: Partition, header: Header, principal: str) -> None:
        """Count the producer or key of a batch, as `count` does."""
        if header.producer_id != NO_PRODUCER:
            keyed = bool(header.flags & Flag.KEYED)
            self.count(partition, header.producer_id, principal, keyed=keyed)

    def count(self, partition: Partition, producer_id: bytes, principal: str, *, keyed: bool = False) -> None:
        """Count a producer, or a key with `keyed`, if it is new here and its principal's are limited.

        The empty principal has no limits: it is that of a node that asks for none.

        Raises:
            Problem: 429 `quota`, with the time until it may bring another one.
        """
        limit = self._services.view.limit(principal, "producers") if principal else None
        if limit is None:
            return
        state = partition.context.state
        known = state.keys.get(producer_id) if keyed else state.producers.progress(producer_id)
        if known is not None:
            return
        rates = self._rates.setdefault(partition, {})
        rate = rates.get(principal)
        if rate is None or rate.limit != limit:
            rate = rates[principal] = Rate(limit, HOUR_MS)
        now_ms = self._services.clock.monotonic_ms()
        wait_ms = rate.wait_ms(now_ms, least=1)
        if wait_ms:
            raise over_limit(
                "producers",
                rate.used(now_ms) + 1,
                limit,
                detail=f"principal {principal!r} brings more new producers and idempotency keys into "
                f"{partition.context.name} in an hour than it may",
                retry_after_ms=min(int(wait_ms) + 1, LONGEST_WAIT_MS),
            )
        rate.take(1, now_ms)
