"""The leader watchdog: it notices that a leader does not answer, and asks other nodes who leads now.

The connections to a node that hangs or is cut off stay open, so nothing shows that no answer will come.
When the oldest request of a partition's queue has had no answer for `PATIENCE_MS`, another node is asked who
leads. If a different node leads, the connection to the silent node is abandoned. Its requests count as lost,
and rule 2 of `policy.record_accumulator` applies: all batches are sent again, in order, with the same
sequence numbers, so that the partition recognises those that it has. While the silent node leads, or no node
does, the question is repeated later: a slow answer is no reason to send everything twice.

Each `Sender` has one watchdog and reports every request to it. The watchdog knows nothing of batches.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from laminar.client.errors import Error
from laminar.client.net.attempts import now_ms
from laminar.client.net.session import Session
from laminar.client.policy.record_accumulator import RecordAccumulator
from laminar.http.client.connection import ClientConnection

PATIENCE_MS = 1_000
QUESTION_TIMEOUT_S = 5.0
# How long the asked node waits for replicas that do not answer it, and at most how long the watchdog then
# pauses before it asks again. The first questions follow quickly, because an election takes a second or two;
# the time doubles every `QUESTIONS_PER_STEP` questions.
FIRST_WAIT_MS = 150
MOST_WAIT_MS = 2_000
QUESTIONS_PER_STEP = 4


def wait_ms(questions: int) -> int:
    """Return how many ms to wait before the next question, after `questions` without a result.

    It is `FIRST_WAIT_MS`, doubled every `QUESTIONS_PER_STEP` questions, at most `MOST_WAIT_MS`.
    """
    return min(MOST_WAIT_MS, FIRST_WAIT_MS << min(questions // QUESTIONS_PER_STEP, 8))


class LeaderWatchdog:
    """A watchdog over the appends of one sender: it finds partitions whose leader has moved unnoticed.

    `on_moved(partition, url)` is called when another node, at `url`, leads the partition; it is called before
    the requests on the abandoned connection fail.
    """

    def __init__(
        self,
        session: Session,
        topic: str,
        accumulator: RecordAccumulator,
        *,
        guard: contextlib.AbstractContextManager[Any],
        on_moved: Callable[[int, str], None],
    ) -> None:
        self._session = session
        self._topic = topic
        self._accumulator = accumulator
        self._guard = guard
        self._on_moved = on_moved
        # The connection that carries the requests of each partition. By rule 2 it is one at a time.
        self._ways: dict[int, ClientConnection] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._questions = 0

    def sent(self, partition: int, connection: ClientConnection) -> None:
        """Note that a request for `partition` was sent over `connection`; its answer is watched for."""
        self._ways[partition] = connection
        if self._timer is None and self._asking is None:
            self._arm(PATIENCE_MS)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _arm(self, delay_ms: int) -> None:
        self._timer = self._session.loop.call_later(delay_ms / 1000, self._look)

    def _look(self) -> None:
        self._timer = None
        silent, next_ms = self._silent()
        if silent:
            self._asking = self._session.loop.create_task(self._ask(silent))
            return
        self._questions = 0
        if next_ms is not None:
            self._arm(max(1, next_ms - now_ms()))

    def _silent(self) -> tuple[dict[int, ClientConnection], int | None]:
        """Return, by partition, the connections that have had no answer for `PATIENCE_MS`.

        The second value is when the next one will be silent for so long (monotonic ms); None if none waits.
        """
        with self._guard:
            queues, next_ms = self._accumulator.silent(now_ms=now_ms(), patience_ms=PATIENCE_MS)
        return {queue.partition: self._ways[queue.partition] for queue in queues}, next_ms

    async def _ask(self, silent: dict[int, ClientConnection]) -> None:
        pause_ms = wait_ms(self._questions)
        self._questions += 1
        try:
            places = await self._session.map_by_others(
                self._topic,
                avoid={connection.url for connection in silent.values()},
                wait_ms=pause_ms,
                timeout_s=QUESTION_TIMEOUT_S,
            )
        except Error:
            pass  # no node knows the leader now; the requests under way have deadlines of their own
        else:
            self._move({partition: places.leader(partition) for partition in silent}, silent)
        self._asking = None
        # Drawn at random, so that the clients of one silent node do not all ask at the same time.
        self._arm(self._session.rng.randint(pause_ms // 2, pause_ms))

    def _move(self, leaders: dict[int, str | None], silent: dict[int, ClientConnection]) -> None:
        """Abort the connection of each partition that another node leads and that still has no answer."""
        still, _ = self._silent()
        abandoned: dict[ClientConnection, str] = {}
        for partition, leader in leaders.items():
            connection = silent[partition]
            if leader in (None, connection.url) or still.get(partition) is not connection:
                continue
            self._on_moved(partition, str(leader))
            abandoned[connection] = f"{connection.url} did not answer, and {leader} leads {partition} now"
        # Connections are aborted after `on_moved` was called for all partitions, because a batch whose
        # connection is aborted is sent to its leader at once.
        for connection, why in abandoned.items():
            self._session.left_silent(connection.url)
            connection.abort(why)
