"""The rules of reclaim, looked at from outside: each change of a cursor, and each partition that goes.

A partition goes only when no cursor has anything to read in it, and none is behind in what it followed; each
of its cursors is in the partitions that follow by then. A refusal names a reason that was true when it was
given. What is gone is 410 everywhere, with its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from laminar.batch import Buffer, Header, body_of
from laminar.node.partition.cursor_commands import FENCE, is_rewind
from laminar.node.partition.state.cursors import CursorChange
from laminar.node.routes import lineage
from membership.records import TopicRecord
from tests.sim.clients import REQUEST_TIMEOUT_S, Answer
from tests.sim.route_rules import changes_of
from tests.sim.watch import Group, Watch
from tests.sim.world import World


@dataclass(frozen=True, slots=True)
class Known:
    """A cursor in a partition from one committed entry on; `position` None: it is deleted."""

    index: int
    name: str
    position: int | None
    owner: str
    since_s: float


class ReclaimRules:
    """The rules of one world, for the cursors of one topic."""

    def __init__(self, world: World, watch: Watch, topic: str) -> None:
        self.world = world
        self.watch = watch
        self.topic = topic
        self.happened: Counter[str] = Counter()
        # Hears of each partition in which a reclaim has begun.
        self.on_fence: list[Callable[[int], None]] = []
        # By partition that is reclaimed: its cursors then.
        self.gone: dict[int, dict[str, Known]] = {}
        # By partition, in the order of entries.
        self._changes: dict[int, list[Known]] = {}
        self._groups: dict[int, Group] = {}
        # Names that somebody has deleted: a group of that name would be a new one.
        self._deleted: set[str] = set()
        watch.routes.on_cursor.append(self._committed)
        watch.routes.on_reclaimed.append(self._reclaimed)

    def group(self, number: int) -> Group:
        """Return what is known of a partition's group, also when it is gone."""
        if number not in self._groups:
            name = f"{self.topic}/{number}"
            self._groups[number] = next(each for each in self.watch.groups.values() if each.name == name)
        return self._groups[number]

    def cursors(self, number: int) -> dict[str, Known]:
        """Return a partition's cursors as they are committed."""
        if number in self.gone:
            return self.gone[number]
        # What was committed may be lost with the power of all nodes.
        last, found = len(self.group(number).entries), dict[str, Known]()
        for each in self._changes.get(number, ()):
            if each.index > last:
                break
            found.pop(each.name, None)
            if each.position is not None and each.name != FENCE:
                found[each.name] = each
        return found

    def _names(self, number: int) -> set[str]:
        return self.cursors(number).keys() - self._deleted

    # -- each change ---------------------------------------------------------------------------

    def _committed(self, topic: TopicRecord, number: int, frame: Buffer) -> None:
        """Check a change of a cursor that is committed for the first time."""
        if topic.name != self.topic:
            return
        change = msgspec.msgpack.decode(body_of(frame), type=CursorChange)
        index, now_s = Header.unpack(frame).index, self.world.loop.time()
        if number in self.gone:
            self._check_gone(number, change)
            return
        known = self._changes.setdefault(number, [])
        while known and known[-1].index >= index:
            known.pop()
        last = next((each for each in reversed(known) if each.name == change.name), None)
        is_new = last is None or last.position is None
        known.append(Known(index, change.name, change.position, change.owner, now_s))
        if change.name == FENCE:
            if change.position is not None:
                self.happened["partitions fenced"] += 1
                for told in self.on_fence:
                    told(number)
        elif change.position is None:
            self._deleted.add(change.name)
        elif is_new and change.position and change.name not in self._deleted:
            self._check_new(topic, number, change)

    def _check_gone(self, number: int, change: CursorChange) -> None:
        """Check what is committed between the catalog's reclaim and the end of the partition's group.

        The fence lets what loses nothing pass: the next leader's fence, another owner of a cursor at the end,
        and the deletion of what is not there.
        """
        who = f"{change} is committed in {number}, which is reclaimed"
        if change.name == FENCE:
            assert change.position is not None, who
            return
        known = self.gone[number].get(change.name)
        assert (known is None) == (change.position is None), f"{who}: {known}"
        if known is not None:
            assert change.position == known.position and not is_rewind(change.owner), f"{who}: {known}"
        self.happened["changes of cursors in reclaimed partitions"] += 1

    def _check_new(self, topic: TopicRecord, number: int, change: CursorChange) -> None:
        """A cursor that was in a partition before this one for long begins at 0."""
        long_ago_s = self.world.loop.time() - 3 * REQUEST_TIMEOUT_S
        for each in all_ancestors(topic, number):
            before = self.cursors(each).get(change.name)
            assert before is None or before.since_s > long_ago_s, (
                f"{change.name} begins at {change.position} of {number}, and was in {each}: {before}"
            )

    def _reclaimed(self, topic: TopicRecord, number: int) -> None:
        """Check a partition that is not in the catalog any more."""
        if topic.name != self.topic:
            return
        who, seal = f"{self.topic}/{number} is reclaimed", lineage.seal_of(topic, number)
        assert seal is not None and self.group(number).reported == seal.index, f"{who}: {seal}"
        before = [each for each in lineage.inputs_of(topic, number) if each not in self.gone]
        assert not before, f"{who} before {before}"
        cursors = self.cursors(number)
        for cursor in cursors.values():
            assert cursor.position is not None and cursor.position >= seal.end_offset, (
                f"{who}: {cursor} is behind"
            )
            assert not is_rewind(cursor.owner), f"{who}: {cursor} is held by a rewind"
        for each in all_ancestors(topic, number):
            lost = self._names(each) - cursors.keys()
            assert not lost, f"{who}: {lost} of {each} have never read it"
        for output in lineage.outputs_of(topic, number):
            lost = cursors.keys() - self._deleted - self._names(output)
            assert not lost, f"{who}: {lost} are not begun in {output}"
        for sink in self.watch.ledger.sinks.values():
            for batch, decision in sink.decisions.items():
                targets = {target.partition for target in decision.targets if target.topic == self.topic}
                published = sink.published.get(batch, {})
                assert number not in targets or number in published, f"{who}: {decision} is not published"
        self.gone[number] = cursors
        self.happened["cursors in reclaimed partitions"] += len(cursors)
        self.happened["records in reclaimed partitions"] += seal.end_offset

    # -- answers -------------------------------------------------------------------------------

    def answered(
        self, number: int, answer: Answer, *, asked_s: float, before: TopicRecord, losses: int
    ) -> None:
        """Check the answer to a request to reclaim; `before` is the topic when it was sent."""
        self.happened[f"reclaim: {answer.code or answer.status}"] += 1
        who = f"reclaim {number}: {answer}"
        seal = lineage.seal_of(before, number)
        if answer.status == 200:
            assert number in self.gone, f"{who}, and it is there"
            return
        assert answer.status in (0, 404, 409, 422, 503, 504, 429, 507, 421), who
        if answer.status == 404:
            assert number not in before.all_numbers, who
        if answer.status == 422:
            inputs = [each for each in lineage.inputs_of(before, number) if each in before.all_numbers]
            assert inputs if answer.limit else seal is None, f"{who}, of {seal} behind {inputs}"
        if answer.code == "not_drained" and losses == self.watch.losses:
            assert isinstance(answer.limit, dict) and answer.limit, who
            end = len(self.group(number).values)
            for name, position in answer.limit.items():
                assert self._was_behind(number, str(name), position, end, asked_s), (
                    f"{who}: {name} was not behind; {self._changes.get(number)}"
                )

    def _was_behind(self, number: int, name: str, position: object, end: int, asked_s: float) -> bool:
        """Whether a cursor was at this position, behind, at some time since the question."""
        until_s = self.world.loop.time()
        for each in reversed(self._changes.get(number, ())):
            if each.name != name or until_s < asked_s:
                continue
            if each.position == position and (position < end or is_rewind(each.owner)):  # type: ignore[operator]
                return True
            until_s = each.since_s
        return False

    def behind(self, number: int, end: int) -> dict[str, int]:
        """Return the cursors of a partition that keep it from being reclaimed, and where they are."""
        return {
            name: each.position
            for name, each in self.cursors(number).items()
            if each.position is not None and (each.position < end or is_rewind(each.owner))
        }

    def check_end(self, topic: TopicRecord) -> None:
        """No cursor of a partition that is gone is lost: it is in all that follows, or that is gone, too."""
        for number, cursors in self.gone.items():
            for output in lineage.outputs_of(topic, number):
                lost = cursors.keys() - self._deleted - self._names(output)
                assert not lost, f"{lost} were at the end of {number}, and are not in {output}"


def all_ancestors(topic: TopicRecord, number: int) -> list[int]:
    """Return the partitions before a partition, also those that are reclaimed."""
    wanted, found = {number}, list[int]()
    for change in reversed(changes_of(topic)):
        if not wanted.isdisjoint(each.number for each in change.outputs):
            inputs = [each.number for each in change.inputs]
            wanted.update(inputs)
            found += inputs
    return found
