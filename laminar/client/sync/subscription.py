"""A member of a group of consumers, without a loop: the twin of `laminar.client.consume.group.subscription`.

Whole batches are passed from the loop's thread to the caller's. The loop counts a batch as handed out before
the caller has seen its records, so it releases a partition only when these records are committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from laminar.client.consume.group import subscription as aio_subscription
from laminar.client.records import ReadBatch, Record
from laminar.client.sync.portal import Portal

T = TypeVar("T")


class Subscription(Generic[T]):
    """This program's membership in a consumer group: it reads the partitions that the group assigns to it.

    ``with topic.subscribe(group="billing") as records: for record in records: ...``. If the block ends
    without an exception, the records that the loop's body has got are committed. In any case the partitions
    are released.
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
        # One iterator for all loops: after a ``break`` the next loop continues within the same batch.
        if self._records is None:
            self._records = self._iterate()
        return self._records

    def _iterate(self) -> Iterator[Record[T]]:
        subscription = self._twin
        try:
            while True:
                lease, batch = self._portal.run(lambda: subscription.take())
                next_offset, last = batch.next_offset, batch.last_offset
                for record in batch.records():
                    if not subscription.may_hand_out(lease) and not self._portal.run(
                        partial(subscription.still_owned, lease)
                    ):
                        break
                    offset = record.offset
                    lease.seen = next_offset if offset == last else offset + 1
                    yield record
        finally:
            self._records = None

    def batches(self) -> Iterator[ReadBatch[T]]:
        """Yield whole batches, without making an object for each record."""
        subscription = self._twin
        subscription._check_entered()
        while True:
            lease, batch = self._portal.run(lambda: subscription.take())
            if subscription.may_hand_out(lease) or self._portal.run(partial(subscription.still_owned, lease)):
                lease.seen = batch.next_offset
                yield batch

    # generated from laminar.client.consume.group.subscription.Subscription,
    # without may_hand_out still_owned take

    def __enter__(self) -> Self:
        self._portal.run(lambda: self._twin.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._portal.closed:
            self._portal.run(lambda: self._twin.__aexit__(kind, error, trace))

    @property
    def partitions(self) -> frozenset[int]:
        """Partitions that this member reads now."""
        return self._twin.partitions

    def commit(self) -> None:
        """Commit the cursor after the records handed out so far.

        Raises:
            Fenced: other members took partitions from this one before all records handed out were committed;
                they read these records again. It is raised once for each loss. The other partitions are
                committed, and reading continues.
        """
        self._portal.run(lambda: self._twin.commit())

    def close(self) -> None:
        """Stop reading, and release the owned partitions at their last committed positions. Idempotent."""
        self._portal.run(lambda: self._twin.close())
