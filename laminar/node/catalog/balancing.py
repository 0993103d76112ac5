"""The timing of the balance by load, on the catalog's leader: reports of the nodes, one move at a time.

What moves, and why, is decided by `laminar.node.placement.balance`. This module decides when: a node must be
above the threshold in `ROUNDS` rounds without a break, the hour must be allowed, and the last move must be
`PAUSE_MS` ago, because until then the averages still show the load before it. The reports are kept in memory,
and for one term only. So a new leader waits until each node has reported to it; it also waits `PAUSE_MS`,
because it does not know when the last move was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Literal

from laminar.node.catalog.group import CatalogGroup
from laminar.node.catalog.messages.answers import BalanceAnswer, NodeBalance
from laminar.node.host.clock import Clock
from laminar.node.host.settings import Settings
from laminar.node.placement.balance import Decision, Move, Survey, allowed_at, deciding, scores_of, stale_pins
from laminar.node.placement.load import HOTTEST, LoadReport
from laminar.node.placement.slices import in_slices
from laminar.node.placement.wanted import Wanted
from membership.records import CatalogState
from membership.requests import PreferLeaders

_log = logging.getLogger("laminar.controller")

ROUND_MS = 10_000
ROUNDS = 3
"""Rounds without a break in which a node must be above the threshold."""

REPORT_VALID_MS = 30_000
"""How long a report counts."""

PAUSE_MS = 180_000
"""Least time from one move to the next: three times that of the averages."""

PARTITION_REST_MS = 30 * 60_000
"""How long a partition that moved is left alone."""

OFF = "balance_threshold is 0: loads are not measured, and nothing moves by load"

_HOUR_MS = 3_600_000


class Balancer:
    """Moves leaders and replicas off overloaded nodes, one move at a time, while this controller leads."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._threshold = settings.balance_threshold
        self._hours = settings.balance_hours
        self._clock = clock
        self._term = 0
        self._reports: dict[str, tuple[int, LoadReport]] = {}  # with the time in ms of the monotonic clock
        self._absent: frozenset[str] = frozenset()
        self._moved: dict[str, int] = {}
        self._rounds = 0
        self._next_ms = 0
        self._paused_until_ms = 0
        self._wanted = Wanted(CatalogState())
        self._survey = Survey(CatalogState(), self._wanted)
        self._deciding = asyncio.Lock()
        self._without_stale_pins: CatalogState | None = None

    def take(self, report: LoadReport, group: CatalogGroup) -> None:
        """Store a node's load report in place of its last one; ignore a report of an unknown node."""
        self._follow_term(group)
        if report.node in group.catalog.state().nodes and len(report.partitions) <= HOTTEST:
            self._reports[report.node] = (self._clock.monotonic_ms(), report)

    async def run_pass(self, group: CatalogGroup, *, absent: Collection[str]) -> None:
        """Look for a move, and perform it if the rules allow it now; do nothing between two rounds.

        `absent` are the nodes that neither gossip nor group 0 sees now.
        """
        self._follow_term(group)
        self._absent = frozenset(absent)
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._next_ms or group.catalog.code_version < 1:
            return
        self._next_ms = now_ms + ROUND_MS
        state = group.catalog.state()
        if self._without_stale_pins is not state:
            lifts = stale_pins(state)
            for lift in lifts:
                result = await group.catalog.change_placement(lift)
                _log.warning("%s: its pin by the balance is stale: %s", lift.partition, result.outcome)
            self._without_stale_pins = None if lifts else state
        if not self._threshold:
            return
        decision = await self._decision(group)
        above = any(score.value > self._threshold for score in decision.scores.values())
        self._rounds = self._rounds + 1 if above else 0
        hour = self._clock.wall_ms() // _HOUR_MS % 24
        if decision.move is None or not allowed_at(self._hours, hour) or (above and self._rounds < ROUNDS):
            return
        await self._perform(group, decision)

    async def answer(self, group: CatalogGroup, *, act: bool) -> BalanceAnswer:
        """Return what the balance would do now; with `act` do it at once, at any hour."""
        self._follow_term(group)
        decision = await self._decision(group)
        done = act and decision.move is not None and await self._perform(group, decision)
        state = group.catalog.state()
        loads = self._fresh()
        return BalanceAnswer(
            threshold=self._threshold,
            hours=self._hours,
            move=_kind(decision.move),
            partitions=list(decision.partitions),
            because=decision.because,
            done=done,
            nodes=[
                NodeBalance(
                    name,
                    record.effective_weight,
                    loads[name].total if name in loads else None,
                    *decision.scores.get(name, (None, None)),
                )
                for name, record in sorted(state.nodes.items())
            ],
        )

    async def _decision(self, group: CatalogGroup) -> Decision:
        """Return the move that is best now, or why there is none; the nodes' scores in either case."""
        async with self._deciding:  # else the survey of another state would change what is wanted meanwhile
            return await self._decided(group)

    async def _decided(self, group: CatalogGroup) -> Decision:
        state, reports, now_ms = group.catalog.state(), self._fresh(), self._clock.monotonic_ms()
        if self._survey.state is not state:
            self._wanted.follow(state)
            self._survey = Survey(state, self._wanted)
        self._moved = {key: at for key, at in self._moved.items() if now_ms - at < PARTITION_REST_MS}
        because = "" if self._threshold else OFF
        if not because and group.catalog.code_version < 1:
            because = "the programs of some nodes do not know the commands of placement yet"
        because = because or await in_slices(self._survey.obstacle(reports, absent=self._absent))
        if not because and now_ms < self._paused_until_ms:
            rest_s = (self._paused_until_ms - now_ms + 999) // 1000
            because = f"after a move, or a change of this leader, loads are measured first: {rest_s} s more"
        if because:
            return Decision(None, because, (), scores_of(state, reports))
        return await in_slices(
            deciding(state, self._wanted, reports, threshold=self._threshold, resting=self._moved)
        )

    async def _perform(self, group: CatalogGroup, decision: Decision) -> bool:
        """Ask the catalog to perform a move; return whether it did."""
        assert decision.move is not None
        result = await group.catalog.change_placement(decision.move)
        _log.warning("balance: %s; %s", decision.because, result.detail or result.outcome)
        now_ms = self._clock.monotonic_ms()
        if result.outcome == "updated":
            self._moved |= dict.fromkeys(decision.partitions, now_ms)
            self._paused_until_ms = now_ms + PAUSE_MS
        self._rounds = 0
        return result.outcome == "updated"

    def _fresh(self) -> dict[str, LoadReport]:
        """Return the reports of the last `REPORT_VALID_MS`, by node."""
        now_ms = self._clock.monotonic_ms()
        return {
            node: report
            for node, (at_ms, report) in self._reports.items()
            if now_ms - at_ms <= REPORT_VALID_MS
        }

    def _follow_term(self, group: CatalogGroup) -> None:
        """Drop all reports if group 0's term has changed since they came."""
        term = group.replica.core.term
        if term != self._term:
            self._term, self._reports, self._rounds = term, {}, 0
            self._paused_until_ms = self._clock.monotonic_ms() + PAUSE_MS


def _kind(move: Move | None) -> Literal["none", "swap_leaders", "pin", "unpin"]:
    if move is None:
        return "none"
    if isinstance(move, PreferLeaders):
        return "swap_leaders"
    return "pin" if move.pin is not None else "unpin"
