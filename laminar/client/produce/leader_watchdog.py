"""Notices that a leader has fallen silent, and asks others whether another leads meanwhile.

A node that is stopped or cut off keeps its connections: nothing tells us that no answer will come. So when
a lane's oldest request is without an answer for `PATIENCE_MS`, a node other than the silent one is asked who
leads. If another does, the connection to the silent one is given up; what was under way on it counts as
lost, and rule 2 of `policy.window` does the rest: it is all sent again, in order, with the same sequences,
so that the partition recognises what it has. While the silent one leads, or nobody does, we wait and ask
again: an answer that takes its time is no reason to send everything twice.

One for each `Sender`, which tells it of every request; it knows no batches and decides nothing about them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from laminar.client.errors import Error
from laminar.client.net.attempts import now_ms
from laminar.client.net.session import Session
from laminar.client.policy.window import Outbox
from laminar.http.client.connection import ClientConnection

PATIENCE_MS = 1_000
QUESTION_TIMEOUT_S = 5.0
# Who is asked waits so long for the word of all others, and then we wait as long before we ask again. Both
# double with every few questions: an election takes a second or two, what takes longer is not hurried by us.
FIRST_WAIT_MS = 150
MOST_WAIT_MS = 2_000
QUESTIONS_PER_STEP = 4


def wait_ms(questions: int) -> int:
    """How long the next question waits, after so many."""
    return min(MOST_WAIT_MS, FIRST_WAIT_MS << min(questions // QUESTIONS_PER_STEP, 8))


class Silence:
    """Watches the requests of one outbox. `on_moved(partition, url)`: another leads it, at `url`.

    It is called before the requests that are given up for it end.
    """

    def __init__(
        self,
        session: Session,
        topic: str,
        outbox: Outbox,
        *,
        guard: contextlib.AbstractContextManager[Any],
        on_moved: Callable[[int, str], None],
    ) -> None:
        self._session = session
        self._topic = topic
        self._outbox = outbox
        self._guard = guard
        self._on_moved = on_moved
        # Where each partition's requests under way are; never on two at a time, by rule 2.
        self._ways: dict[int, ClientConnection] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._questions = 0

    def sent(self, partition: int, connection: ClientConnection) -> None:
        """A request for `partition` is on its way over `connection`."""
        self._ways[partition] = connection
        if self._timer is None and self._asking is None:
            self._arm(PATIENCE_MS)

    def close(self) -> None:
        """Look no more. Idempotent."""
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
        """Partitions without an answer for too long, with the connections they wait on."""
        with self._guard:
            lanes, next_ms = self._outbox.silent(now_ms=now_ms(), patience_ms=PATIENCE_MS)
        return {lane.partition: self._ways[lane.partition] for lane in lanes}, next_ms

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
            pass  # nobody can tell now; what is under way has a deadline of its own
        else:
            self._move({partition: places.leader(partition) for partition in silent}, silent)
        self._asking = None
        # Drawn, so that those whom the same node left without an answer do not ask all at once.
        self._arm(self._session.rng.randint(pause_ms // 2, pause_ms))

    def _move(self, leaders: dict[int, str | None], silent: dict[int, ClientConnection]) -> None:
        """Give up the connections of those that another leads and that are still without an answer."""
        still, _ = self._silent()
        given_up: dict[ClientConnection, str] = {}
        for partition, leader in leaders.items():
            connection = silent[partition]
            if leader in (None, connection.url) or still.get(partition) is not connection:
                continue
            self._on_moved(partition, str(leader))
            given_up[connection] = f"{connection.url} did not answer, and {leader} leads {partition} now"
        # Only when the new ways of all are known: what is given up looks for its way at once.
        for connection, why in given_up.items():
            self._session.left_silent(connection.url)
            connection.abort(why)
