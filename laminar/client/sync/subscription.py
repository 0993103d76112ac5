"""A member of a group of consumers, without a loop: the twin of `laminar.client.consume.subscription`.

Batches cross over from the loop's thread whole, so a batch counts as handed out there before its records are
seen here: a partition is given back only when they are committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from laminar.client.consume import subscription as aio_subscription
from laminar.client.records import ReadBatch, Record
from laminar.client.sync.portal import Portal

T = TypeVar("T")


class Subscription(Generic[T]):
    """``with topic.subscribe(group="billing") as records: for record in records: ...``.

    The clean end of the block commits what the loop's body has seen; every end gives the partitions back.
    """

    def __init__(self, portal: Portal, subscription: aio_subscription.Subscription[T]) -> None:
        self._portal = portal
        self._twin = subscription
        self._records: Iterator[Record[T]] | None = None
        self.group = subscription.group
        self.mode = subscription.mode
        self.member = subscription.member

    def __iter__(self) -> Iterator[Record[T]]:
        self._twin._check_entered()
        # One for all loops: the rest of a batch that a loop broke off in is the next loop's.
        if self._records is None:
            self._records = self._iterate()
        return self._records

    def _iterate(self) -> Iterator[Record[T]]:
        subscription = self._twin
        try:
            while True:
                lease, batch = self._portal.run(lambda: subscription.take())
                for record in batch.records():
                    if not subscription.may_hand_out(lease) and not self._portal.run(
                        partial(subscription.still_owned, lease)
                    ):
                        break
                    lease.seen = record.offset + 1
                    yield record
        finally:
            self._records = None

    def batches(self) -> Iterator[ReadBatch[T]]:
        """Yield the records batch-wise, without an object per record."""
        subscription = self._twin
        subscription._check_entered()
        while True:
            lease, batch = self._portal.run(lambda: subscription.take())
            if subscription.may_hand_out(lease) or self._portal.run(partial(subscription.still_owned, lease)):
                lease.seen = batch.next_offset
                yield batch

    # generated from laminar.client.consume.subscription.Subscription, without may_hand_out still_owned take

    def __enter__(self) -> Self:
        self._portal.run(lambda: self._twin.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._portal.loop.is_closed():
            self._portal.run(lambda: self._twin.__aexit__(kind, error, trace))

    @property
    def partitions(self) -> frozenset[int]:
        """Partitions that this member reads now."""
        return self._twin.partitions

    def commit(self) -> None:
        """Commit the cursor at the records handed out so far.

        Raises:
            Fenced: once, where partitions were taken from this member with records that it had handed out
                and not committed: others read these again. All else is committed, and reading continues.
        """
        self._portal.run(lambda: self._twin.commit())

    def close(self) -> None:
        """Stop reading, and give back what is owned, at its last commit. Idempotent."""
        self._portal.run(lambda: self._twin.close())
