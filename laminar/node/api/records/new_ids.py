"""Limit the new producers and idempotency keys of a principal in a partition.

A partition remembers 10,000 of each, and refuses a new one rather than forget one of the last hour. So a
principal that uses ever new ones could prevent all others from appending with theirs. The limit `producers`
is the most new ones that a principal may use in an hour. It is counted in the leader's memory only: a new
leader counts from 0.
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
    """Counts the new producers and keys of principals that have the limit `producers`."""

    def __init__(self, services: ShardServices) -> None:
        self._services = services
        self._rates: WeakKeyDictionary[Partition, dict[str, Rate]] = WeakKeyDictionary()

    def count_batch(self, partition: Partition, header: Header, principal: str) -> None:
        """Count the producer or idempotency key of a batch if it is new here.

        Raises 429 `quota` if the principal may use no further one now, as `count` does.
        """
        if header.producer_id != NO_PRODUCER:
            keyed = bool(header.flags & Flag.KEYED)
            self.count(partition, header.producer_id, principal, keyed=keyed)

    def count(self, partition: Partition, producer_id: bytes, principal: str, *, keyed: bool = False) -> None:
        """Count a producer (with `keyed` a key), if it is new here and its principal has a limit.

        The principal is "" without access control, and has no limits then.

        Raises:
            Problem: 429 `quota`, with the time after which the principal may use another new one.
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
                detail=f"principal {principal!r} has used too many new producers and idempotency keys in "
                f"{partition.context.name} within an hour",
                retry_after_ms=min(int(wait_ms) + 1, LONGEST_WAIT_MS),
            )
        rate.take(1, now_ms)
