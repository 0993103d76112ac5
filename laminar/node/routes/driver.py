"""Drive the changes of routes, on the node that leads the catalog (docs/routes.md).

Each change has a task. It polls the leaders of the change's inputs (the partitions that end) and outputs
(those that replace them) every `plan.ROUND_MS`, and asks the catalog to close or cancel the change, as `plan`
decides. The catalog records each step, and refuses one that no longer fits its state. So the next leader of
the catalog can continue at any point. The leaders of the inputs seal them by themselves when the change is
closing (`laminar.node.shard.route_changes`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec

from laminar.node.host.clock import Clock
from laminar.node.routes import plan
from laminar.node.routes.messages import QUESTION, PartitionAnswer, PartitionQuestion, RouteProgress
from laminar.node.runtime.cluster_view import View
from laminar.node.transport.transport import Transport, TransportError
from membership.catalog import Catalog, NotCatalogLeader, OutcomeUnknown
from membership.records import CatalogState, RouteChange, TopicRecord
from membership.requests import CancelChange, CloseChange
from membership.tables import Table

_log = logging.getLogger("laminar.routes")

ASK_TIMEOUT_S = 0.8
# How long the outcome of a topic's last change is remembered, by their number.
MOST_OUTCOMES = 1_000
# A closing change that waits for this number of rounds is logged, and again whenever the number has doubled.
SLOW_ROUNDS = 50

_answer_decoder = msgspec.msgpack.Decoder(PartitionAnswer)


class RouteDriver:
    """The driver of route changes in one controller.

    `led_catalog()` returns the catalog while this node leads it, else None. The copy may be outdated, for
    example after an election: then the catalog refuses each step. Call `changed()` whenever the catalog has
    changed, or this node has begun or ceased to lead it.
    """

    def __init__(
        self,
        *,
        view: View,
        clock: Clock,
        transport: Transport,
        led_catalog: Callable[[], Catalog | None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._view = view
        self._clock = clock
        self._transport = transport
        self._led_catalog = led_catalog
        self._spawn = spawn
        self._changed = asyncio.Event()
        # The topics as of the last look, and those of which a task has ended since.
        self._seen: Table[str, TopicRecord] = Table()
        self._ended: set[str] = set()
        self._progress: dict[str, RouteProgress] = {}
        self._driven: dict[int, asyncio.Task[None]] = {}
        self._watched: dict[int, _Driven] = {}
        self._counts = {"done": 0, "cancelled": 0}
        # By phase: how often it ended while this node led, and how long that took together, in ms.
        self._phases = {"preparing": [0, 0], "closing": [0, 0]}

    def changed(self) -> None:
        """Wake the driver: the catalog, or its leadership, has changed."""
        self._changed.set()

    def progress_of(self, topic: str) -> RouteProgress:
        """Return what the topic's change waits for, and why the last one was cancelled, if known here."""
        return self._progress.get(topic, RouteProgress())

    def statistics(self) -> dict[str, Any]:
        """Return counts of changes that ended while this node led the catalog, and what is under way."""
        return {
            "changes": dict(self._counts),
            "under_way": len(self._driven),
            "closing_longest_ms": max((each.closing_ms for each in self._watched.values()), default=0),
            "phases": {name: {"count": count, "ms": ms} for name, (count, ms) in self._phases.items()},
        }

    async def run(self) -> None:
        """Begin to drive each change that is under way, while this node leads the catalog."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            catalog = self._led_catalog()
            if catalog is None:
                self._seen = Table()
                self._progress.clear()
                continue
            topics = catalog.state().topics
            ended, self._ended = self._ended, set()
            for name in ended | topics.changes_since(self._seen).keys():
                topic = topics.get(name)
                if topic is not None and topic.change is not None and topic.change.id not in self._driven:
                    change = topic.change
                    self._driven[change.id] = self._spawn(self._drive(name, change))
            self._seen = topics

    # -- one change --------------------------------------------------------------------------

    async def _drive(self, topic: str, change: RouteChange) -> None:
        """Drive one change until it is done or cancelled, or this node no longer leads the catalog."""
        _log.info("%s: change %d is %s", topic, change.id, change.state)
        driven = self._watched[change.id] = _Driven(self, topic, change)
        try:
            await driven.run()
        finally:
            del self._driven[change.id], self._watched[change.id]
            self._ended.add(topic)
            self._changed.set()

    def current(self, topic: str, change_id: int) -> tuple[Catalog, CatalogState, RouteChange] | None:
        """Return the catalog, its state and a change; None if the change is over or another node leads."""
        catalog = self._led_catalog()
        if catalog is None:
            return None
        state = catalog.state()
        record = state.topics.get(topic)
        if record is None or record.change is None or record.change.id != change_id:
            self._note_end(record, change_id)
            return None
        return catalog, state, record.change

    def _note_end(self, record: TopicRecord | None, change_id: int) -> None:
        done = record is not None and any(each.id == change_id for each in record.changes or ())
        self._counts["done" if done else "cancelled"] += 1

    def note_phase(self, phase: str, ms: int) -> None:
        """Count the end of a phase (`preparing` or `closing`) of a change, and the `ms` that it took."""
        self._phases[phase][0] += 1
        self._phases[phase][1] += ms

    def note(self, topic: str, change_id: int, waits_for: Iterable[str]) -> None:
        """Remember, for `progress_of`, what a change waits for."""
        known = self._progress.pop(topic, RouteProgress())
        self._remember(topic, msgspec.structs.replace(known, id=change_id, waits_for=list(waits_for)))

    def note_cancelled(self, topic: str, change_id: int, because: Iterable[str]) -> None:
        """Remember, for `progress_of`, what a change waited for when it was cancelled."""
        self._remember(topic, RouteProgress(cancelled=change_id, because=list(because)))

    def _remember(self, topic: str, progress: RouteProgress) -> None:
        self._progress.pop(topic, None)
        self._progress[topic] = progress
        if len(self._progress) > MOST_OUTCOMES:
            del self._progress[next(iter(self._progress))]

    # -- questions ---------------------------------------------------------------------------

    def now_ms(self) -> int:
        """Return the time of the monotonic clock in ms."""
        return self._clock.monotonic_ms()

    def wall_ms(self) -> int:
        """Return the wall-clock time in ms since the epoch."""
        return self._clock.wall_ms()

    async def ask(
        self, state: CatalogState, topic: str, change: RouteChange, *, hold: bool, drop: bool
    ) -> plan.Round:
        """Ask all replicas of a change's inputs and outputs for their state; return the leaders' answers.

        `hold` and `drop` are requests to the inputs, as in `PartitionQuestion`.
        """
        asked_ms = self.now_ms()
        questions = {}
        inputs = [each.number for each in change.inputs]
        for number in (*inputs, *(each.number for each in change.outputs)):
            record = state.partitions.get(f"{topic}/{number}")
            if record is None or record.state != "live":
                continue
            question = PartitionQuestion(record.group)
            if number in inputs:
                question = PartitionQuestion(record.group, plan.HOLD_MS if hold else 0, drop)
            nodes = {each.node for each in (*record.replicas, *(gone.replica for gone in record.leaving))}
            questions[number] = (question, sorted(nodes))
        asked = [
            (number, self._ask_one(node, topic, number, question))
            for number, (question, nodes) in questions.items()
            for node in nodes
        ]
        said = await asyncio.gather(*(each for _, each in asked))
        answers = {
            number: answer
            for (number, _), answer in zip(asked, said, strict=True)
            if answer is not None and answer.leads
        }
        return plan.Round(asked_ms, hold, drop, answers)

    async def _ask_one(
        self, node: str, topic: str, number: int, question: PartitionQuestion
    ) -> PartitionAnswer | None:
        address = self._view.partition_address(node, topic, number)
        if address is None:
            return None
        payload = msgspec.msgpack.encode(question)
        try:
            return _answer_decoder.decode(
                await self._transport.call(address, QUESTION, payload, timeout=ASK_TIMEOUT_S)
            )
        except (TransportError, msgspec.DecodeError):
            return None


class _Driven:
    """The driving of one change: what its inputs were asked last, and when their leaders last answered."""

    def __init__(self, driver: RouteDriver, topic: str, change: RouteChange) -> None:
        self._driver = driver
        self._topic = topic
        self._id = change.id
        now_ms = driver.now_ms()
        # A driver that begins in the middle gives the change some time to be closed, whatever its clock says.
        passed_ms = min(driver.wall_ms() - change.begun_ms, change.wait_ms - plan.LEAST_MS)
        self._began_ms = now_ms - max(0, passed_ms)
        self._heard_ms = {each.number: now_ms for each in change.inputs}
        self._hold = self._drop = False
        self._phase = change.state
        self._phase_ms = now_ms
        self._rounds = 0

    @property
    def closing_ms(self) -> int:
        """How long, in ms, this node has seen the change `closing`; 0 if it is not."""
        return self._driver.now_ms() - self._phase_ms if self._phase == "closing" else 0

    async def run(self) -> None:
        """Poll inputs and outputs, and act, until the change is over or another node leads the catalog."""
        while True:
            found = self._driver.current(self._topic, self._id)
            if found is None:
                self._enter("")
                return
            catalog, state, change = found
            self._enter(change.state)
            again_at_once = False
            try:
                if change.state == "preparing":
                    again_at_once = await self._prepare(catalog, state, change)
                else:
                    await self._await_seals(state, change)
            except (NotCatalogLeader, OutcomeUnknown) as error:
                _log.debug("%s: change %d: %s", self._topic, self._id, error)
            if not again_at_once:
                await asyncio.sleep(plan.ROUND_MS / 1000)

    def _enter(self, phase: str) -> None:
        """Note the state that the change is in now; "": it is over, or no longer this node's."""
        if phase != self._phase:
            now_ms = self._driver.now_ms()
            self._driver.note_phase(self._phase, now_ms - self._phase_ms)
            self._phase_ms, self._rounds = now_ms, 0
            self._phase = phase  # type: ignore[assignment]
            self._driver.note(self._topic, 0 if not phase else self._id, ())

    async def _prepare(self, catalog: Catalog, state: CatalogState, change: RouteChange) -> bool:
        """Ask one round of questions and act on it; return whether the next round begins without a pause."""
        driver = self._driver
        last = await driver.ask(state, self._topic, change, hold=self._hold, drop=self._drop)
        now_ms = driver.now_ms()
        for number in last.answers:
            self._heard_ms[number] = now_ms
        partitions = state.partitions
        decision = plan.decide(
            change,
            last,
            creating=[
                each.number
                for each in change.outputs
                if partitions[f"{self._topic}/{each.number}"].state != "live"
            ],
            silent_ms={each.number: now_ms - self._heard_ms[each.number] for each in change.inputs},
            elapsed_ms=now_ms - self._began_ms,
            now_ms=now_ms,
        )
        self._hold, self._drop = decision.hold, decision.drop
        driver.note(self._topic, self._id, decision.waits_for)
        match decision.action:
            case "close":
                result = await catalog.change_route(CloseChange(self._topic, self._id))
                _log.info("%s: change %d closes: %s", self._topic, self._id, result.outcome)
            case "cancel":
                cancel = CancelChange(self._topic, self._id, driver.wall_ms())
                result = await catalog.change_route(cancel)
                _log.warning(
                    "%s: change %d is cancelled after %d ms, as it waits for: %s (%s)",
                    *(self._topic, self._id, change.wait_ms, "; ".join(decision.waits_for), result.outcome),
                )
                if result.outcome == "deleted":
                    driver.note_cancelled(self._topic, self._id, decision.waits_for)
            case "wait":
                return decision.at_once
        return True

    async def _await_seals(self, state: CatalogState, change: RouteChange) -> None:
        """Note what a closing change waits for. The leaders of its inputs seal them by themselves."""
        last = await self._driver.ask(state, self._topic, change, hold=True, drop=False)
        waits_for = plan.waits_of_closing(change, last)
        self._driver.note(self._topic, self._id, waits_for)
        self._rounds += 1
        if self._rounds >= SLOW_ROUNDS and self._rounds & (self._rounds - 1) == 0:
            _log.warning(
                "%s: change %d is closing for %d rounds, and waits for: %s",
                *(self._topic, self._id, self._rounds, "; ".join(waits_for)),
            )
