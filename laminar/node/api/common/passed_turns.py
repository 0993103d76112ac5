"""Fairness for forwarded requests: their principals take turns at the leader, as its own clients do.

Forwarded requests arrive on the connections between nodes, mixed for all principals. So each waits for a turn
of its principal before it begins; an append that waited for its commit waits for another turn before it is
answered. These turns count together with those of the principal's own connections to this shard. The requests
of one principal begin in the order in which they arrived, so that numbered batches do not overtake each
other. Calls that requests make (`laminar.node.api.common.forwarding.IN_TURNS`) wait for a turn to begin, too.

A process works on a bounded number of calls at a time, and refuses all further ones. So one principal may
never have all of them.
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
"""The most requests in progress of a principal, as a multiple of the free calls: 4 is four fifths of all."""

RETRY_AFTER_MS: Final = 100


class PassedTurns:
    """Lets forwarded requests and calls wait for a turn of their principal."""

    def __init__(self, turns: Callable[[], Turns], *, in_progress: Callable[[], int]) -> None:
        """Create it; `in_progress` returns how many calls of other processes are under way here."""
        self._turns = turns
        self._in_progress = in_progress

    async def answer(
        self, flow: Flow, body_bytes: int, carry_out: Callable[[], Response | Awaitable[Response]]
    ) -> Response:
        """Wait for a turn of the flow (the principal), then call `carry_out` and return its answer.

        Raises:
            Problem: 503 `overloaded` if the principal has too many requests in progress; nothing was begun.
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
        """Wait for a turn of the flow (the principal), then make the call `carry_out` and return its result.

        Raises:
            Problem: 503 `overloaded` if the principal has too many requests in progress; nothing was begun.
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
                "too many requests of this principal that other shards forwarded are in progress",
                field="requests",
                value=flow.passed + 1,
                limit=most,
                retry_after_ms=RETRY_AFTER_MS,
                outcome="not_applied",
            )
        turns = self._turns()
        turns.enter(flow)
        return turns
