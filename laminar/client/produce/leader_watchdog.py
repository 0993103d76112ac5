"""Notices that a leader has gone silent, and asks other nodes whether another one leads now.

A node that is stopped or cut off keeps its connections open: nothing shows that no answer will come. So when
the oldest request of a partition's queue has had no answer for `PATIENCE_MS`, a node other than the silent
one is asked who leads. If another does, the connection to the silent one is abandoned; its requests count as
lost, and rule 2 of `policy.record_accumulator` applies: everything is sent again, in order, with the same
sequence numbers, so that the partition recognises what it has. While the silent node leads, or no node does,
the question is repeated later: a slow answer is no reason to send everything twice.

One for each `Sender`, which reports every request to it. It knows no batches and decides nothing about them.
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
# How long the asked node waits for the answers of the others, and then how long we wait before we ask again.
# Both double with every few questions: an election takes a second or two, and a longer wait needs no haste.
FIRST_WAIT_MS = 150
MOST_WAIT_MS = 2_000
QUESTIONS_PER_STEP = 4


def wait_ms(questions: int) -> int:
    """Return the pause in ms before the next question, after `questions` questions without a result.

    `FIRST_WAIT_MS`, doubled every `QUESTIONS_PER_STEP` questions, at most `MOST_WAIT_MS`.
    """
    return min(MOST_WAIT_MS, FIRST_WAIT_MS << min(questions // QUESTIONS_PER_STEP, 8))


class LeaderWatchdog:
    """Watches the requests of one accumulator.

    `on_moved(partition, url)` says that another node leads it, at `url`. It is called before the requests on
    the abandoned connection end.
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
        # Where each partition's requests under way are; never on two at a time, by rule 2.
        self._ways: dict[int, ClientConnection] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._questions = 0

    def sent(self, partition: int, connection: ClientConnection) -> None:
        """Note that a request for `partition` was sent over `connection`."""
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
        """Return the partitions without an answer for too long, and the connections they wait on."""
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
            pass  # no node can say now; what is under way has a deadline of its own
        else:
            self._move({partition: places.leader(partition) for partition in silent}, silent)
        self._asking = None
        # Drawn, so that those whom the same node left without an answer do not ask all at once.
        self._arm(self._session.rng.randint(pause_ms // 2, pause_ms))

    def _move(self, leaders: dict[int, str | None], silent: dict[int, ClientConnection]) -> None:
        """Abort the connections of partitions that another node leads and that still have no answer."""
        still, _ = self._silent()
        given_up: dict[ClientConnection, str] = {}
        for partition, leader in leaders.items():
            connection = silent[partition]
            if leader in (None, connection.url) or still.get(partition) is not connection:
                continue
            self._on_moved(partition, str(leader))
            given_up[connection] = f"{connection.url} did not answer, and {leader} leads {partition} now"
        # Only when the new leaders of all are known: an abandoned batch looks for its leader at once.
        for connection, why in given_up.items():
            self._session.left_silent(connection.url)
            connection.abort(why)
