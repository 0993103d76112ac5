"""Balance by load: the one move that lowers the hottest node's score, or why there is none.

`deciding` reads the catalog and the newest load report of each node, and nothing else. The rules:

1. Nothing moves while a placement is on its way or incomplete, or a node is absent or silent
   (`Survey.obstacle`).
2. A move is made only for a node whose score is above the threshold, the hottest first. Leadership goes
   first: two partitions that both nodes hold swap their preferred leaders, so each node leads as many as
   before, and the even spread (`preferred_leaders`) is kept. Only if no swap helps a replica moves, by a pin
   of the owner `OWNER`.
3. A move lowers the larger score of the two nodes by `MARGIN` or more, and leaves the leaders spread so that
   none changes after it. All other scores stay, so under a constant load the sorted scores only ever go down:
   no placement comes back, and moves end.
4. A pin of another owner is never changed. A pin of `OWNER` is lifted while no score is above the threshold,
   if without it each node concerned stays `LIFT_MARGINS` margins below the threshold, so the lift leads to no
   new move; and at any time if it contradicts the nodes or the topic (`stale_pins`).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from laminar.node.placement.load import Load, LoadReport, PartitionLoad, Score, Scores, amount
from laminar.node.placement.preferred_leaders import choosing
from laminar.node.placement.slices import SLICE
from laminar.node.placement.wanted import Wanted, belonging_weights, wanted_number, zones_of
from membership.records import CatalogState, PartitionRecord, Pin
from membership.requests import PinPartition, PreferLeaders

OWNER = "balance"
"""The owner of the pins that are made here."""

MARGIN = 0.05
"""Least by which a move lowers the larger score of its two nodes."""

LIFT_MARGINS = 2
"""How many margins below the threshold the nodes must stay without a pin, for it to be lifted."""

CONSIDERED = 16
"""Most partitions of the hottest node that are considered for one move: the hottest of the measure."""

TRIED = 4
"""Most nodes above the threshold for which a move is looked for, the hottest first; and most of its moves."""

Move = PreferLeaders | PinPartition


class Decision(NamedTuple):
    """The move to make, or None; the reason as text, with numbers; the score of each node that reports."""

    move: Move | None
    because: str
    partitions: tuple[str, ...]
    """The partitions that the move concerns."""
    scores: dict[str, Score]


class _Option(NamedTuple):
    """A possible move, and the larger score of its two nodes after it."""

    after: float
    move: Move
    because: str
    partitions: tuple[str, ...]
    nodes: tuple[str, ...] | None = None
    """Of the move of a replica: the nodes of the partition after it."""


class Survey:
    """Finds what forbids a move in one catalog state: an unfinished placement, or an absent or silent node.

    Each partition is examined once, however often `obstacle` is called.
    """

    def __init__(self, state: CatalogState, wanted: Wanted) -> None:
        self.state = state
        self._wanted = wanted
        self._done = False
        self._holding: set[str] = set()
        self._unfinished = ""

    def obstacle(
        self, reports: Mapping[str, LoadReport], *, absent: Collection[str]
    ) -> Generator[None, None, str]:
        """Return, after some slices of work, the reason why nothing may move now; "" if moves are allowed.

        `reports` are those recent enough to be used.
        """
        belonging = belonging_weights(self.state).keys()
        yield from self._look()
        # A node that is drained and stopped has nothing to do with any load.
        missing = sorted(set(absent) & (belonging | self._holding))
        if missing:
            return (
                f"nodes are absent: {', '.join(missing)}; start them, or drain those that are gone for good"
            )
        silent = sorted(belonging - reports.keys())
        if silent:
            return f"no load is reported yet by {', '.join(silent)}"
        return self._unfinished

    def _look(self) -> Generator[None, None, None]:
        if self._done:
            return
        first = ""
        for number, (key, partition) in enumerate(self.state.partitions.items(), 1):
            if number % SLICE == 0:
                yield
            self._holding.update(each.node for each in partition.replicas)
            why = "" if first and key > first else self._why_unfinished(key, partition)
            if why:
                first, self._unfinished = key, why
        self._done = True

    def _why_unfinished(self, key: str, partition: PartitionRecord) -> str:
        held = {each.node for each in partition.replicas}
        if (
            partition.state != "live"
            or partition.leaving
            or not all(each.made for each in partition.replicas)
        ):
            return f"replicas of {key} are being made or moved"
        if any(each.lost or each.abandoned for each in partition.replicas):
            return f"{key} has lost a replica"
        if len(held) < wanted_number(self.state, partition):
            return f"{key} has fewer replicas than it should have"
        if held != set(self._wanted.nodes(partition)):
            return f"{key} is not on the nodes that it should be on"
        return ""


def deciding(
    state: CatalogState,
    wanted: Wanted,
    reports: Mapping[str, LoadReport],
    *,
    threshold: float,
    resting: Collection[str] = (),
) -> Generator[None, None, Decision]:
    """Return, after some slices of work, the next move, or None with the reason.

    Call it only if `Survey.obstacle` found none. `resting` are partitions that moved lately, and are left
    alone.
    """
    weights, totals = belonging_weights(state), _totals(state, reports)
    scores = Scores(totals, weights)
    by_node = scores_of(state, reports)
    if not by_node:
        return Decision(None, "no node reports its load", (), by_node)
    order = sorted(by_node, key=lambda node: (-by_node[node].value, node))
    found = _Round(state, wanted, reports, scores, resting=set(resting))
    if by_node[order[0]].value <= threshold:
        lift = found.lift(threshold)
        if lift is not None:
            return Decision(lift.move, lift.because, lift.partitions, by_node)
        largest = by_node[order[0]].value
        because = f"largest score {largest:.2f} ({order[0]}) is not above {threshold:.2f}"
        return Decision(None, because, (), by_node)
    above = [node for node in order if by_node[node].value > threshold]
    whys = []
    refused = ""
    for hot in above[:TRIED]:
        score = by_node[hot]
        whys.append(f"{hot} has a score of {score.value:.2f}, by {amount(totals[hot], score.measure)}")
        for options in (found.swaps(hot, score), found.replica_moves(hot, score)):
            better = [option for option in options if option.after <= score.value - MARGIN]
            for best in sorted(better, key=lambda option: option.after)[:TRIED]:
                if (yield from _changes_leaders(state, best)):
                    refused = " and leaves the other leaders where they are"
                    continue
                because = f"{whys[-1]}; {best.because}: then at most {best.after:.2f}"
                return Decision(best.move, because, best.partitions, by_node)
    because = f"{'; '.join(whys)}; no move lowers that by {MARGIN} or more{refused}"
    return Decision(None, because, (), by_node)


def _changes_leaders(state: CatalogState, option: _Option) -> Generator[None, None, bool]:
    """Return whether the even spread would change other preferred leaders after the move of a replica.

    A node that leads too little may get the lead of what it holds now, and the scores would not be those that
    the move was chosen for.
    """
    if option.nodes is None:
        return False
    key = option.partitions[0]
    partition = state.partitions[key]
    leader = partition.preferred_leader
    former = next(iter({each.node for each in partition.replicas} - set(option.nodes)))
    other = next(iter(set(option.nodes) - {each.node for each in partition.replicas}))
    moved = replace(
        partition,
        replicas=[replace(each, node=other) if each.node == former else each for each in partition.replicas],
        preferred_leader=other if leader == former else leader,
    )
    chosen = yield from choosing(replace(state, partitions=state.partitions | {key: moved}))
    return bool(chosen)


def scores_of(state: CatalogState, reports: Mapping[str, LoadReport]) -> dict[str, Score]:
    """Return the score of each node that may hold replicas and has a report."""
    totals = _totals(state, reports)
    scores = Scores(totals, belonging_weights(state))
    return {node: scores.of(node, load) for node, load in totals.items()}


def _totals(state: CatalogState, reports: Mapping[str, LoadReport]) -> dict[str, Load]:
    return {node: reports[node].total for node in belonging_weights(state) if node in reports}


def stale_pins(state: CatalogState) -> list[PinPartition]:
    """Return the requests that lift the pins made here (owner `OWNER`) that contradict the catalog.

    Such a pin names more or fewer nodes than the topic has replicas, or a node that may hold none.
    """
    weights = belonging_weights(state)
    return [
        PinPartition(key, partition.version, None)
        for key, partition in _pinned(state)
        if partition.pin is not None
        and (
            len(partition.pin.nodes) != state.topics[partition.topic].replicas
            or not weights.keys() >= set(partition.pin.nodes)
        )
    ]


def _pinned(state: CatalogState) -> list[tuple[str, PartitionRecord]]:
    """Return the partitions with a pin of `OWNER`, in the order of their keys."""
    return sorted(
        (key, partition)
        for key, partition in state.partitions.items()
        if partition.pin is not None and partition.pin.owner == OWNER
    )


def allowed_at(hours: str, hour: int) -> bool:
    """Return whether the setting `hours`, such as "22-06", lets the balance act in this hour (UTC).

    The first hour is allowed and the last is not. "" and two equal hours allow the whole day.
    """
    if not hours:
        return True
    first, last = (int(each) for each in hours.split("-"))
    return first <= hour < last if first < last else hour >= first or hour < last


class _Round:
    """The moves that are possible for one catalog state and one set of reports."""

    def __init__(
        self,
        state: CatalogState,
        wanted: Wanted,
        reports: Mapping[str, LoadReport],
        scores: Scores,
        *,
        resting: set[str],
    ) -> None:
        self._state = state
        self._wanted = wanted
        self._reports = reports
        self._scores = scores
        self._resting = resting
        self._weights = belonging_weights(state)
        self._zones = zones_of(state)

    def _after(self, first: str, second: str, moved: Load) -> float:
        """Return the larger score of two nodes, once `moved` has gone from the first to the second."""
        return max(
            self._scores.of(first, self._reports[first].total - moved).value,
            self._scores.of(second, self._reports[second].total + moved).value,
        )

    def _movable(self, node: str) -> dict[str, PartitionLoad]:
        """Return the reported partitions of a node that may move, by key, the hottest first."""
        return {
            each.partition: each
            for each in self._reports[node].partitions
            if each.partition not in self._resting
            and (partition := self._state.partitions.get(each.partition)) is not None
            and (partition.preferred_leader == node) == each.leads
            and any(replica.node == node for replica in partition.replicas)
        }

    def _of_measure(self, node: str, score: Score, *, led: bool) -> list[PartitionLoad]:
        """Return the node's partitions that have most of the measure, `CONSIDERED` at most."""

        def has(each: PartitionLoad) -> float:
            value: float = getattr(each.load.of_leader if led else each.load, score.measure)
            return value

        movable = [each for each in self._movable(node).values() if has(each) > 0]
        return sorted(movable, key=lambda each: (-has(each), each.partition))[:CONSIDERED]

    # -- leadership ----------------------------------------------------------------------

    def swaps(self, hot: str, score: Score) -> Iterator[_Option]:
        """Return the swaps of preferred leaders between the hottest node and others."""
        quiet: dict[str, list[PartitionLoad]] = {}
        for given in self._of_measure(hot, score, led=True):
            if not given.leads:
                continue
            for other in self._holders(given.partition):
                if other == hot or other not in self._weights:
                    continue
                if other not in quiet:
                    quiet[other] = list(self._led_by(other, held_by=hot))
                for taken in quiet[other]:
                    moved = given.load.of_leader - taken.load.of_leader
                    yield _Option(
                        self._after(hot, other, moved),
                        PreferLeaders({given.partition: other, taken.partition: hot}),
                        f"{other} leads {given.partition} ({amount(given.load, score.measure)}) and {hot} "
                        f"leads {taken.partition} ({amount(taken.load, score.measure)})",
                        (given.partition, taken.partition),
                    )

    def _holders(self, key: str) -> list[str]:
        return [each.node for each in self._state.partitions[key].replicas]

    def _led_by(self, node: str, *, held_by: str) -> Iterator[PartitionLoad]:
        """Return the partitions that `node` leads and `held_by` holds, too; of those not reported, one."""
        for each in self._movable(node).values():
            if each.leads and held_by in self._holders(each.partition):
                yield each
        reported = {each.partition for each in self._reports[node].partitions}
        for key, partition in self._state.partitions.items():
            others = key not in reported and key not in self._resting
            if others and partition.preferred_leader == node and held_by in self._holders(key):
                yield PartitionLoad(key, leads=True, load=Load())
                return

    # -- replicas ------------------------------------------------------------------------

    def replica_moves(self, hot: str, score: Score) -> Iterator[_Option]:
        """Return the moves of replicas from the hottest node to nodes that do not hold the partition.

        A replica that leads moves only if it is the only one: else the next leader is not known.
        """
        for each in self._of_measure(hot, score, led=False):
            partition = self._state.partitions[each.partition]
            held = self._holders(each.partition)
            pinned = partition.pin is not None and partition.pin.owner != OWNER
            if pinned or (each.leads and len(held) > 1):
                continue
            for other in self._weights:
                if other in held or self._reports[other].disk_is_low:
                    continue
                nodes = [other if name == hot else name for name in self._wanted.nodes(partition)]
                if self._spread(nodes) < self._spread(held):
                    continue
                after = self._after(hot, other, each.load)
                reason = f"score of {hot} {score.value:.2f}, now at most {after:.2f}, by {score.measure}"
                yield _Option(
                    after,
                    self._placed_on(nodes, each.partition, partition, reason),
                    f"{other} holds {each.partition} ({amount(each.load, score.measure)}) instead of {hot}",
                    (each.partition,),
                    tuple(nodes),
                )

    def _spread(self, nodes: Collection[str]) -> int:
        """Return over how many zones the nodes are spread."""
        return len({self._zones.get(node, "") for node in nodes})

    def _placed_on(self, nodes: list[str], key: str, partition: PartitionRecord, reason: str) -> PinPartition:
        """Return the pin to these nodes, or the lift of the pin if the rank names the same ones."""
        if set(nodes) == set(self._by_rank(partition)):
            return PinPartition(key, partition.version, None)
        return PinPartition(key, partition.version, Pin(nodes, OWNER, reason))

    def _by_rank(self, partition: PartitionRecord) -> list[str]:
        return self._wanted.nodes(replace(partition, pin=None))

    def lift(self, threshold: float) -> _Option | None:
        """Return the lift of the first pin of ours without which the nodes stay well below the threshold."""
        limit = threshold - LIFT_MARGINS * MARGIN
        for key, partition in _pinned(self._state):
            if key in self._resting:
                continue
            after = self._after_lift(key, partition)
            if after <= limit:
                return _Option(
                    after,
                    PinPartition(key, partition.version, None),
                    f"{key} needs no pin any more: without it the largest score of its nodes is {after:.2f}",
                    (key,),
                )
        return None

    def _after_lift(self, key: str, partition: PartitionRecord) -> float:
        """Return the largest score of the nodes that get a replica when a partition is unpinned."""
        held, ranked = set(self._holders(key)), set(self._by_rank(partition))
        known = [
            each
            for node in held
            for each in (self._reports[node].partitions if node in self._reports else [])
            if each.partition == key
        ]
        most = next((each.load for each in known if each.leads), known[0].load if known else Load())
        # As if the leadership went along: which node will lead is not known.
        loads = {node: self._reports[node].total + most for node in ranked - held}
        return max((self._scores.of(node, load).value for node, load in loads.items()), default=0.0)
