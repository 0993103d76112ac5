"""The turns of requests that other shards passed on, at the leader: a principal has no more here than there.

They come on the connections of nodes, mixed with those of all principals. So each waits for a turn of its
principal to begin, and for another one to be answered, if many become due together. The turns are those of
the principal's own connections here. Those of one principal begin in the order in which they came: numbered
batches may not overtake each other. Calls that requests make (`laminar.node.api.common.forwarding.IN_TURNS`)
take turns to begin as requests do.

No principal may have all the calls that a process works on at a time: once it has none free, a process
refuses all that others pass on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from laminar.http.api.problems import Problem
from laminar.http.protocol.flows import REQUEST, REQUEST_SHIFT, Flow, Turns
from laminar.http.protocol.messages import Later, Response
from laminar.node.transport.rpc import MAX_CALLS_IN_PROGRESS

T = TypeVar("T")

SHARE: Final = 4
"""Requests that a principal may have in progress, for each call that is free: alone it has four fifths."""

RETRY_AFTER_MS: Final = 100


class PassedTurns:
    """The turns of one shard, for requests that come from other shards."""

    def __init__(self, turns: Callable[[], Turns], *, in_progress: Callable[[], int]) -> None:
        """`in_progress` returns how many calls of other processes this one works on, of all principals."""
        self._turns = turns
        self._in_progress = in_progress

    async def answer(
        self, flow: Flow, body_bytes: int, carry_out: Callable[[], Response | Awaitable[Response]]
    ) -> Response:
        """Return the answer of `carry_out`, which is called at the flow's turn.

        Raises:
            Problem: 503 `overloaded`: its principal has too much in progress. Nothing was begun.
        """
        turns = self._enter(flow)
        try:
            await turns.turn(flow, REQUEST + REQUEST * (body_bytes >> REQUEST_SHIFT))
            answer = carry_out()
            if isinstance(answer, Response):
                return answer
            if type(answer) is not Later:
                return await answer
            result = await asyncio.shield(answer.future)
            await turns.turn(flow, 1)
            return answer.make(result)
        finally:
            turns.exit(flow)

    async def call(self, flow: Flow, payload_bytes: int, carry_out: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `carry_out`, a call that a request makes, which begins at the flow's turn.

        Raises:
            Problem: as `answer`.
        """
        turns = self._enter(flow)
        try:
            await turns.turn(flow, REQUEST + REQUEST * (payload_bytes >> REQUEST_SHIFT))
            return await carry_out()
        finally:
            turns.exit(flow)

    def _enter(self, flow: Flow) -> Turns:
        most = SHARE * max(0, MAX_CALLS_IN_PROGRESS - self._in_progress())
        if flow.passed > most:
            raise Problem(
                "overloaded",
                "a principal has too many requests in progress that other shards passed on",
                field="requests",
                value=flow.passed + 1,
                limit=most,
                retry_after_ms=RETRY_AFTER_MS,
                outcome="not_applied",
            )
        turns = self._turns()
        turns.enter(flow)
        return turns
