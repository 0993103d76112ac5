"""The rules of jobs that transactions acknowledge, looked at from outside, as `channel_rules` does.

A batch pins jobs that are out under the deliveries that its driver named, before it is decided. Its pins end
as done only when it is decided, and its decision names the entry that pinned them; else they end when it is
not decided, and never will be. Who was told that it is committed has ended its jobs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laminar.batch import Header
from laminar.node.partition.state.channels import Out
from laminar.node.partition.state.pins import Pinned, PinsEnded
from laminar.node.partition.state.sinks import Decision
from laminar.node.partition.state.staged_batches import BatchKey
from tests.sim.sinks import Ledger

if TYPE_CHECKING:
    from tests.sim.channel_rules import Known, Log, Token


@dataclass(slots=True)
class PinnedHere:
    """What a batch has pinned in a partition: the entry, and the offsets by channel."""

    entry: int
    offsets: dict[int, set[int]] = field(default_factory=dict)


class PinRules:
    """The pins in one topic's partitions."""

    def __init__(self, ledger: Ledger, happened: Counter[str]) -> None:
        # By batch: the deliveries that its driver asked to be acknowledged with it.
        self.asked: dict[BatchKey, set[Token]] = defaultdict(set)
        self._ledger = ledger
        self._happened = happened
        self._ever: set[Token] = set()
        # What a person took from its batch, who moved or deleted its channel.
        self._taken: set[Token] = set()

    def was_pinned(self, token: Token) -> bool:
        """Whether a batch has pinned it once: then it was late to whoever named it alone."""
        return token in self._ever

    def was_taken(self, token: Token) -> bool:
        """Whether it may come again though its batch is committed."""
        return token in self._taken

    def taken(self, log: Log, known: Known, out: Mapping[int, Out]) -> None:
        """Note that what a channel has pinned is not pinned any more, as a person wishes."""
        self._taken.update((known.name, log.number, offset, out[offset].delivery) for offset in known.pins)
        self._happened["taken from their batch"] += len(known.pins)
        known.pins.clear()

    def pinned(self, log: Log, known: Known, change: Pinned, offsets: Iterable[int], header: Header) -> None:
        """Check a change that pins records of a channel."""
        batch = (change.sink, change.number, change.epoch)
        who = f"{log.number}: entry {header.index} pins for {batch} ({known.name})"
        held = log.pins.setdefault(batch, PinnedHere(header.index))
        assert held.entry == header.index, f"{who}: entry {held.entry} has pinned for it"
        for offset in offsets:
            out = known.out.get(offset)
            assert out is not None, f"{who}: {offset} is not out"
            assert offset not in known.pins, f"{who}: {known.pins[offset]} has pinned {offset}"
            token = (known.name, log.number, offset, out.delivery)
            assert token in self.asked[batch], f"{who}: nobody acknowledges {token} with it"
            known.pins[offset] = batch
            held.offsets.setdefault(known.id, set()).add(offset)
            self._ever.add(token)
            self._happened["pinned"] += 1

    def ended(self, log: Log, change: PinsEnded, header: Header, taken_s: float) -> None:
        """Check a change that ends what a batch has pinned."""
        batch = (change.sink, change.number, change.epoch)
        who = f"{log.number}: entry {header.index} ends {batch}"
        held = log.pins.pop(batch, None)
        assert held is not None, f"{who}, which has pinned nothing"
        named = self._names(log, batch, held.entry)
        assert named == change.done, (
            f"{who} as {'done' if change.done else 'not done'}: {self._decision(batch)}"
        )
        for channel, offsets in held.offsets.items():
            known = log.channels.get(channel)
            if known is None:
                continue
            still = {offset for offset in offsets if known.pins.get(offset) == batch}
            for offset in still:
                del known.pins[offset]
                known.since[offset] = (header.term, taken_s)
            if change.done:
                known.end(still)
            self._happened["ended with their batch" if change.done else "unpinned"] += len(still)
        if change.done:
            sink = self._ledger.sinks[change.sink]
            sink.ended.setdefault(change.number, set()).add(log.number)

    def stored(self, log: Log) -> dict[BatchKey, tuple[int, dict[int, set[int]]]]:
        """Return what the table of a partition must have: by batch, the entry and what is pinned yet."""
        found: dict[BatchKey, tuple[int, dict[int, set[int]]]] = {}
        for batch, held in log.pins.items():
            parts = {
                channel: {each for each in offsets if log.channels[channel].pins.get(each) == batch}
                for channel, offsets in held.offsets.items()
                if channel in log.channels
            }
            found[batch] = held.entry, {channel: left for channel, left in parts.items() if left}
        return found

    def _decision(self, batch: BatchKey) -> Decision | None:
        sink, number, epoch = batch
        known = self._ledger.sinks.get(sink)
        decision = None if known is None else known.decisions.get(number)
        return decision if decision is not None and decision.epoch == epoch else None

    def _names(self, log: Log, batch: BatchKey, entry: int) -> bool:
        """Whether the batch is decided with what this entry has pinned."""
        decision = self._decision(batch)
        targets = () if decision is None else decision.targets
        return any((each.partition, each.pin_index) == (log.number, entry) for each in targets)
