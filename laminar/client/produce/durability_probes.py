"""Questions to leaders whether accepted batches are durable, while no append is under way that would tell.

A leader accepts the batches of a named producer before they are durable, and says in its later answers how
far it has committed. If no later append comes, it is asked after `PROBE_MS`; sooner if the program waits for
all records, or if a partition has as many accepted batches as it may have.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from laminar.client.errors import Error
from laminar.client.net.session import Session, topic_path
from laminar.client.policy.partition_queue import MOST_FLYING, PartitionQueue, Pending
from laminar.client.policy.record_accumulator import RecordAccumulator

# If nothing is being sent, and accepted batches are not known to be durable, their leader is asked after this
# time.
PROBE_MS = 1_000
# The leader answers when the batch is durable, or after this time.
PROBE_WAIT_MS = 1_000
PROBE_TIMEOUT_S = 5.0
PROBE_PAUSE_S = 0.1


class DurabilityProbes:
    """Asks the leaders of one sender's partitions, each with one question at a time.

    `leaders` has the URLs of the leaders that are known, by partition; it is the sender's, and changes.
    `on_lost(queue, why)` is called if a leader is gone or does not know the batch; `on_asked` after each
    question.
    """

    def __init__(
        self,
        session: Session,
        topic: str,
        accumulator: RecordAccumulator,
        *,
        producer_id: bytes,
        guard: contextlib.AbstractContextManager[Any],
        leaders: Mapping[int, str],
        on_lost: Callable[[PartitionQueue, str], None],
        on_asked: Callable[[], None],
    ) -> None:
        self._session = session
        self._topic = topic
        self._accumulator = accumulator
        self._producer_id = producer_id
        self._guard = guard
        self._leaders = leaders
        self._on_lost = on_lost
        self._on_asked = on_asked
        self._hurries = 0
        self._asking: dict[int, asyncio.Task[None]] = {}
        # By partition, since when nothing is under way and only accepted batches have no receipt.
        self._quiet_ms: dict[int, int] = {}

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """Within the block, ask without waiting for `PROBE_MS`. From any thread."""
        self._hurries += 1
        try:
            yield
        finally:
            self._hurries -= 1

    def look_after(self, queue: PartitionQueue, now: int) -> None:
        """Ask the leader of `queue` if that is due at `now` (monotonic ms)."""
        partition = queue.partition
        if queue.under_way or queue.recovering or not queue.flying or partition in self._asking:
            if queue.under_way or not queue.flying:
                self._quiet_ms.pop(partition, None)
            return
        since = self._quiet_ms.setdefault(partition, now)
        if self._hurries or len(queue.flying) >= MOST_FLYING or now - since >= PROBE_MS:
            pending = queue.flying[-1 if self._hurries else 0]
            self._asking[partition] = self._session.loop.create_task(self._ask(queue, pending))

    def next_ms(self) -> int | None:
        """Return when the next question is due (monotonic ms); None if none is planned."""
        waiting = [at for partition, at in self._quiet_ms.items() if partition not in self._asking]
        return min(waiting) + PROBE_MS if waiting else None

    def learned(self, queue: PartitionQueue, term: int, committed: int) -> None:
        """Note that the leader of `term` has committed the partition's records before offset `committed`."""
        self._accumulator.learned(queue, term=term, committed=committed)
        # Later reads of this client contain everything that is committed.
        self._session.seen.advance(self._topic, queue.partition, committed)

    def close(self) -> None:
        """Ask no more. Idempotent."""
        for task in self._asking.values():
            task.cancel()

    async def _ask(self, queue: PartitionQueue, pending: Pending) -> None:
        partition = queue.partition
        target = (
            f"{topic_path(self._topic)}/partitions/{partition}/producers/{self._producer_id.hex()}"
            f"?epoch={pending.epoch}&sequence={pending.sequence}&wait_ms={PROBE_WAIT_MS}"
        )
        try:
            answer = await self._session.call(
                "GET", target, first=self._leaders.get(partition), timeout_s=PROBE_TIMEOUT_S
            )
            with self._guard:
                self.learned(
                    queue,
                    int(answer.headers["laminar-term"]),
                    int(answer.headers["laminar-committed"]),
                )
            if not pending.settled:
                await asyncio.sleep(PROBE_PAUSE_S)  # so that quick answers do not lead to a busy loop
        except Error as error:
            self._on_lost(queue, str(error))  # the leader is gone, or does not know the batch
        finally:
            self._asking.pop(partition, None)
            self._quiet_ms.pop(partition, None)
        self._on_asked()
