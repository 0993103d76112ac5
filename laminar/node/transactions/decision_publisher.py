"""Publishes what a coordinator has decided, in every partition, and records in its log when that is done.

A batch is published only when the entry with its decision is committed. Failed requests are repeated. A later
leader finds the decisions that are not published everywhere in its table, and continues with them
(`finish_all`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from laminar.http.api.problems import Problem
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.sinks import Decision, Target
from laminar.node.transactions.sink_log import SinkLog

_log = logging.getLogger("laminar.transactions")

# Pause before a failed publish is tried again; it doubles up to the second value.
RETRY_S = 0.05
SLOWEST_RETRY_S = 2.0
# Pause before a decision whose stages a partition has lost is tried again (`finish_all`).
LOST_RETRY_S = 30.0
# How long a request waits for its decision to be published everywhere; then it is answered
# `outcome_unknown`. The same request, repeated, waits as long again.
PUBLISH_WAIT_S = 20.0


class PublishTargets(Protocol):
    """The leaders of other partitions, on any node."""

    async def publish(self, sink: bytes, number: int, epoch: int, target: Target) -> None:
        """Ask the leader of a target to publish the batch. Raises `Problem`.

        If the target's group was deleted, it returns as after a success: nothing is left to do there.
        """


class DecisionPublisher:
    """Publishes the open decisions of one coordinator, while this process leads its partition."""

    def __init__(
        self,
        partition: Partition,
        sinks: SinkLog,
        targets: PublishTargets,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._partition = partition
        self._sinks = sinks
        self._targets = targets
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        # By sink: a decision whose stages a partition has lost, that partition's answer, and the loop's time
        # of the answer.
        self._lost: dict[bytes, tuple[Decision, Problem, float]] = {}
        # Sinks whose decision is being published here; each future is resolved when the attempt has ended.
        self._finishing: dict[bytes, asyncio.Future[None]] = {}

    async def finished(self, sink_id: bytes, number: int) -> None:
        """Wait until a decided batch is published everywhere.

        Raises:
            Problem: 504 `outcome_unknown` after `PUBLISH_WAIT_S`, or when this replica stops leading;
                `stages_lost` when the batch can't be published any more.
        """
        why = "not yet published in every partition"
        try:
            async with asyncio.timeout(PUBLISH_WAIT_S):
                while True:
                    sink = self._sinks.get(sink_id)
                    if sink.epoch == 0:
                        raise Problem("no_such_sink", "the sink is not known any more")
                    if sink.number >= number and (sink.undone is None or sink.undone.number > number):
                        return
                    lost = self._lost.get(sink_id)
                    if lost is not None and lost[0] == sink.undone:
                        break
                    self._finish(sink_id)
                    await asyncio.shield(self._finishing[sink_id])
            raise Problem("stages_lost", f"batch {number} of this sink is decided, and {lost[1].detail}")
        except TimeoutError:
            pass
        except Problem as problem:
            if problem.code == "stages_lost":
                raise
            why = problem.detail or problem.code
        raise Problem("outcome_unknown", f"batch {number} of this sink is decided, and {why}")

    async def _is_undone(self, sink_id: bytes, decision: Decision) -> bool:
        """Return whether a decision is not published everywhere yet; False if this replica does not lead.

        A majority confirms that after this call. Otherwise a deposed leader could report stages as lost that
        were published long ago, and that the partition has forgotten since.
        """
        try:
            await self._partition.reader.confirmed_end()
        except Problem:
            return False
        known = self._partition.state.sinks.get(sink_id)
        return known is not None and known.undone == decision

    def finish_all(self) -> None:
        """Start to publish every open decision, also those of earlier leaders. Call it periodically."""
        if self._partition.leads:
            for sink_id in self._partition.state.sinks.undone():
                # A decision with lost stages ends only when the topic that lost them is deleted. So it is
                # tried again, at long intervals.
                lost = self._lost.get(sink_id)
                if lost is None or self._loop.time() - lost[2] >= LOST_RETRY_S:
                    self._finish(sink_id)

    def _finish(self, sink_id: bytes) -> None:
        if sink_id not in self._finishing:
            self._finishing[sink_id] = self._loop.create_future()
            self._spawn(self._publish(sink_id))

    async def _publish(self, sink_id: bytes) -> None:
        """Publish the sink's open decision in every partition, then record that in the log.

        It repeats failed requests, and ends when all is published, when stages are lost, or when this replica
        no longer leads.
        """
        pause_s = RETRY_S
        try:
            while self._partition.leads:
                sinks = self._partition.state.sinks
                sink = sinks.get(sink_id)
                if sink is None or sink.undone is None:
                    return
                decision = sink.undone
                committed = sinks.committed_at(sink_id)
                if committed is None or committed.undone != decision:
                    # Before the decision's entry is committed, no reader may see any record of the batch.
                    await self._sinks.until_committed()
                    continue
                answers = await asyncio.gather(
                    *(
                        self._targets.publish(sink_id, decision.number, decision.epoch, target)
                        for target in decision.targets
                    ),
                    return_exceptions=True,
                )
                failed = [answer for answer in answers if isinstance(answer, BaseException)]
                for error in failed:
                    if not isinstance(error, Problem):
                        raise error
                    if error.code == "no_stage" and await self._is_undone(sink_id, decision):
                        # `no_stage` comes only from a leader, and every leader has the prepare as long as any
                        # replica of its group has it: the stages are lost for good.
                        self._lost[sink_id] = (decision, error, self._loop.time())
                        _log.error("batch %d of sink %s: %s", decision.number, sink.name, error)
                        return
                try:
                    if not failed:
                        self._lost.pop(sink_id, None)
                        now = self._sinks.get(sink_id)
                        if now.undone == decision:
                            # Not awaited: all readers see the batch, so its commit is answered. If this entry
                            # is lost with the leadership, the next leader publishes again, which changes
                            # nothing.
                            noted = self._sinks.change(
                                sink_id, msgspec.structs.replace(now, undone=None), ends=True
                            )
                            noted.add_done_callback(_note_lost)
                        return
                except Problem as problem:
                    failed = [problem]
                _log.info("batch %d of sink %s is published again: %s", decision.number, sink.name, failed[0])
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, SLOWEST_RETRY_S)
        finally:
            self._finishing.pop(sink_id).set_result(None)


def _note_lost(noted: asyncio.Future[Receipt]) -> None:
    """Log that the end of a decision was not recorded; `finish_all` of a leader records it later."""
    if not noted.cancelled() and noted.exception() is not None:
        _log.info("the end of a decision is not recorded yet: %s", noted.exception())
