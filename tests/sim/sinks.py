"""What must hold of transactions at every step, seen from outside as everything that `watch` sees.

A `Ledger` knows what drivers staged, what they asked to be committed and what they were told; and it is shown
each committed entry of every group: decisions in the coordinators' logs, publishes in those of the targets.
Of each sink: epochs only rise; a decision is of the epoch in force, rises in number and comes when the one
before is published in all its partitions; a publish comes when its decision is committed; each partition
takes each batch once, whole, as one of the commits asked for it; nobody is told what is not so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from laminar.batch import HEADER_SIZE, Batch, Buffer, Header, as_published
from laminar.node.partition.state.sinks import Decision, Sink, SinkChange
from laminar.node.partition.state.staging_entries import publish_record
from laminar.node.transactions.coordinator import id_of

# By partition, the numbers of the stages that a commit names.
Parts = dict[int, tuple[int, ...]]

_changes = msgspec.msgpack.Decoder(SinkChange)


@dataclass(slots=True)
class Tried:
    """One batch under one epoch: what is staged by partition and number, and the commits asked for."""

    staged: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    asked: list[Parts] = field(default_factory=list)


@dataclass(slots=True)
class Known:
    """One sink as its coordinator's log has it, and its publishes by number: partition and epoch of each.

    `ended`: by number, the partitions that have ended the jobs that a batch acknowledges.
    """

    sink: Sink = field(default_factory=lambda: Sink(""))
    decisions: dict[int, Decision] = field(default_factory=dict)
    published: dict[int, dict[int, int]] = field(default_factory=dict)
    ended: dict[int, set[int]] = field(default_factory=dict)

    def is_published(self, number: int) -> bool:
        """Whether every partition of a decision has published it."""
        targets = self.decisions[number].targets
        with_records = {target.partition for target in targets if target.has_records}
        with_jobs = {target.partition for target in targets if target.pin_index}
        return with_records == set(self.published.get(number, ())) and with_jobs <= self.ended.get(
            number, set()
        )


class Ledger:
    """See the module. Of one topic, in whose partitions all is published."""

    def __init__(self) -> None:
        self.sinks: dict[bytes, Known] = {}
        self.tried: dict[tuple[bytes, int, int], Tried] = {}
        # Batches of an epoch that a driver was told are not committed, and that he did not ask for again.
        self.denied: set[tuple[bytes, int, int]] = set()
        # By group and entry: the values of what is staged there.
        self._staged: dict[tuple[str, int], list[bytes]] = {}
        self.happened: Counter[str] = Counter()

    def known(self, name: str) -> Known:
        """A sink by its name."""
        return self.sinks.setdefault(id_of(name), Known())

    def tries(self, name: str, number: int, epoch: int) -> Tried:
        """What a driver does for one batch under his epoch."""
        return self.tried.setdefault((id_of(name), number, epoch), Tried())

    # -- what is committed -----------------------------------------------------------------

    def staged(self, group: str, header: Header, frame: Buffer) -> None:
        """A `staged` entry is committed."""
        seen = as_published(frame, publish=header, base_offset=0).joined()
        self._staged[(group, header.index)] = [bytes(value) for value in Batch(seen).values]

    def changed(self, who: str, frame: Buffer) -> None:
        """A `sink` entry is committed."""
        change = _changes.decode(memoryview(frame)[HEADER_SIZE:])
        known = self.sinks.setdefault(change.sink_id, Known())
        before, after = known.sink, change.sink
        if after.once and after.epoch == after.first > before.epoch:
            # It is new, or new again: one that was forgotten, and the janitor asked for.
            assert before.epoch == 0 or (before.once and before.undone is None), f"{who}: {before}, {after}"
            self.happened["sinks begun once"] += 1
            self.happened["sinks forgotten and ended"] += before.epoch > 0
            known.sink = after
            return
        assert after.epoch in (before.epoch, before.epoch + 1), (
            f"{who}: the epoch of {after.name} goes from {before.epoch} to {after.epoch}"
        )
        if after.number != before.number:
            decision = after.undone
            assert decision is not None and decision.number == after.number > before.number, (
                f"{who}: {after.name} goes from batch {before.number} to {after.number} by {decision}"
            )
            assert decision.epoch == before.epoch, (
                f"{who}: batch {after.number} of {after.name} is decided for epoch {decision.epoch}, "
                f"in force is {before.epoch}"
            )
            assert before.number < 0 or known.is_published(before.number), (
                f"{who}: batch {after.number} of {after.name} is decided before {before.number} is published"
            )
            assert (change.sink_id, decision.number, decision.epoch) not in self.denied, (
                f"{who}: batch {after.number} of {after.name} is decided, its driver was told that it is not"
            )
            known.decisions[decision.number] = decision
            self.happened["batches decided"] += 1
        elif after.undone is None and before.undone is not None:
            assert known.is_published(before.number), (
                f"{who}: batch {before.number} of {after.name} is said to be published everywhere"
            )
        known.sink = after

    def publishing(self, who: str, frame: Buffer) -> None:
        """A leader takes a `publish`: its decision is committed by then."""
        record = publish_record(frame)
        decision = self.sinks.setdefault(record.sink, Known()).decisions.get(record.number)
        assert decision is not None and decision.epoch == record.epoch, (
            f"{who}: batch {record.number} of epoch {record.epoch} is published; decided is {decision}"
        )

    def published(self, who: str, group: str, header: Header, frame: Buffer) -> list[bytes]:
        """A `publish` is committed; the values that readers see there."""
        record = publish_record(frame)
        self.publishing(who, frame)
        partition = int(group.rpartition("/")[2])
        known = self.sinks[record.sink]
        earlier = [number for number, partitions in known.published.items() if partition in partitions]
        assert record.number > max(earlier, default=-1), (
            f"{who}: batch {record.number} is published after {max(earlier)}"
        )
        for number in known.decisions:
            assert number >= record.number or known.is_published(number), (
                f"{who}: batch {record.number} is published before {number} is everywhere"
            )
        known.published.setdefault(record.number, {})[partition] = record.epoch
        values = [value for index, _ in record.stages for value in self._staged[(group, index)]]
        assert len(values) == header.count, f"{who}: {header.count} offsets for {len(values)} records"
        tried = self.tried[(record.sink, record.number, record.epoch)]
        asked = [
            [value for stage in sorted(parts[partition]) for value in tried.staged[(partition, stage)]]
            for parts in self._asked(record.sink, record.number, record.epoch)
        ]
        assert values in asked, f"{who}: {values} are published; asked for were {asked}"
        self.happened["publishes"] += 1
        return values

    def _asked(self, sink: bytes, number: int, epoch: int) -> list[Parts]:
        """The commits that a decision may have come from: those of its partitions."""
        targets = {target.partition for target in self.sinks[sink].decisions[number].targets}
        return [parts for parts in self.tried[(sink, number, epoch)].asked if set(parts) == targets]

    # -- what drivers are told --------------------------------------------------------------

    def told_epoch(self, name: str, epoch: int) -> None:
        """`begin` was answered: so the epoch is committed."""
        known = self.known(name)
        assert known.sink.epoch >= epoch, f"epoch {epoch} of {name} was told; committed is {known.sink.epoch}"

    def denied_for_good(self, name: str, number: int, epoch: int) -> None:
        """A driver was told, whenever he asked, that this batch is not committed; he does not ask again."""
        known, key = self.known(name), (id_of(name), number, epoch)
        decision = known.decisions.get(number)
        assert decision is None or decision.epoch != epoch, f"batch {number} of {name} is denied: {decision}"
        self.denied.add(key)

    def told_committed(self, name: str, number: int) -> None:
        """A commit was answered: the batch, or a later one, is published in every partition."""
        known = self.known(name)
        assert known.sink.number >= number, f"batch {number} of {name} is told as committed: {known.sink}"
        if number in known.decisions:
            assert known.is_published(number), (
                f"batch {number} of {name} is told as committed; published: {known.published.get(number)} "
                f"of {known.decisions[number]}"
            )

    # -- the end ---------------------------------------------------------------------------

    def check_end(self) -> None:
        """What was decided is published everywhere, once."""
        for known in self.sinks.values():
            assert known.sink.undone is None, f"never published everywhere: {known.sink}"
            for number in known.decisions:
                assert known.is_published(number), f"batch {number} of {known.sink.name}: {known.published}"
            stray = set(known.published) - set(known.decisions)
            assert not stray, f"published and never decided: {stray} of {known.sink.name}"
