"""Balance by load: one move at a time, each lowers a hot node's score, and a constant load comes to rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from laminar.node.placement.balance import (
    MARGIN,
    OWNER,
    Decision,
    allowed_at,
    stale_pins,
)
from laminar.node.placement.load import HOTTEST, Load, LoadReport, PartitionLoad, Scores, hottest, merged
from laminar.node.placement.wanted import Wanted
from membership.placement_rules import change_placement
from membership.records import CatalogState, LeavingReplica, PartitionRecord, Pin, ReplicaRecord
from membership.requests import ChangePlacement, PinPartition, PreferLeaders
from tests.membership.nodes import node
from tests.node.placement.at_once import choose, decide, obstacle
from tests.node.placement.test_preferred_leaders import chosen, cluster, counts

MI = float(1 << 20)


def reports_of(state: CatalogState, loads: dict[str, Load]) -> dict[str, LoadReport]:
    """Return what the nodes would report if each partition had this load where it is led."""
    found = {}
    for name in state.nodes:
        partitions = []
        for key, partition in state.partitions.items():
            if any(each.node == name for each in partition.replicas):
                load = loads.get(key, Load())
                leads = partition.preferred_leader == name
                held = Load(written_bytes_per_s=load.written_bytes_per_s, stored_bytes=load.stored_bytes)
                partitions.append(PartitionLoad(key, leads, load if leads else held))
        total = sum((each.load for each in partitions), Load())
        found[name] = LoadReport(name, total, hottest(partitions, total))
    return found


def decided(state: CatalogState, loads: dict[str, Load], **more: Any) -> Decision:
    """Decide, with nothing in the way."""
    wanted, reports = Wanted(state), reports_of(state, loads)
    assert obstacle(state, wanted, reports, absent=()) == ""
    return decide(state, wanted, reports, threshold=more.pop("threshold", 1.25), **more)


def perform(state: CatalogState, decision: Decision) -> CatalogState:
    """Commit a move, carry it out at once, and choose leaders as the catalog's leader does."""
    assert decision.move is not None
    state, result = change_placement(state, ChangePlacement(decision.move))
    assert result.outcome == "updated", (result, decision)
    wanted = Wanted(state)
    partitions = {}
    for key, partition in state.partitions.items():
        names = wanted.nodes(partition)
        stay = [each for each in partition.replicas if each.node in names]
        new = set(names) - {each.node for each in stay}
        next_id = partition.highest_replica_id + 100_000
        added = [ReplicaRecord(next_id, name, state.nodes[name].store_id, made=True) for name in new]
        partitions[key] = replace(partition, replicas=[*stay, *added])
    return chosen(replace(state, partitions=partitions))


def heavy(mi: float) -> Load:
    """Return the load of a partition to which so many MiB/s are appended."""
    return Load(
        appended_bytes_per_s=mi * MI, written_bytes_per_s=mi * MI, requests_per_s=mi, stored_bytes=mi * MI
    )


def scores(state: CatalogState, loads: dict[str, Load]) -> list[float]:
    totals = {name: report.total for name, report in reports_of(state, loads).items()}
    compared = Scores(totals, {name: record.effective_weight for name, record in state.nodes.items()})
    return sorted((compared.of(name, load).value for name, load in totals.items()), reverse=True)


def led_by(state: CatalogState, name: str) -> list[str]:
    return [key for key, each in state.partitions.items() if each.preferred_leader == name]


# -- the score ---------------------------------------------------------------------------


def test_a_score_is_the_largest_share_and_a_small_load_has_none() -> None:
    compared = Scores({"a": heavy(300), "b": heavy(0)}, {"a": 1.0, "b": 1.0})
    assert compared.of("a", heavy(300)).value == pytest.approx(304 / 154)
    assert compared.of("a", heavy(300)).measure == "appended_bytes_per_s"
    small = Scores({"a": heavy(0.2), "b": heavy(0)}, {"a": 1.0, "b": 1.0})
    assert small.of("a", heavy(0.2)).value < 1.05
    weighted = Scores({"a": heavy(200), "b": heavy(100)}, {"a": 2.0, "b": 1.0})
    assert weighted.of("a", heavy(200)).value == pytest.approx(1.0)


def test_a_report_names_the_hottest_of_each_measure_and_not_more() -> None:
    many = [PartitionLoad(f"t/{n}", True, Load(requests_per_s=1.0 + n / 1000)) for n in range(200)]
    full = PartitionLoad("full/0", False, Load(stored_bytes=1e12))
    reports = [
        LoadReport("a", Load(requests_per_s=220.0), many),
        LoadReport("a", Load(stored_bytes=1e12), [full], disk_is_low=True),
    ]
    report = merged("a", reports)
    assert len(report.partitions) == HOTTEST and report.partitions[0] == full and report.disk_is_low
    assert report.partitions[1].partition == "t/199"
    assert report.total == Load(requests_per_s=220.0, stored_bytes=1e12)


# -- moves -------------------------------------------------------------------------------


def test_a_hot_and_a_quiet_partition_swap_leaders_and_the_choice_of_leaders_keeps_it() -> None:
    state = chosen(cluster("abc", 6))
    hot, warm = led_by(state, "a")
    loads = {hot: heavy(200), warm: heavy(200)}
    decision = decided(state, loads)
    assert isinstance(decision.move, PreferLeaders) and len(decision.move.nodes) == 2
    after, _ = change_placement(state, ChangePlacement(decision.move))
    assert choose(after) == {} and set(counts(after).values()) == {2}
    assert scores(after, loads)[0] <= scores(state, loads)[0] - MARGIN
    assert "a has a score of" in decision.because and "200.0 MiB/s of appended bytes" in decision.because
    settled = decided(after, loads)
    assert settled.move is None and "no move lowers that" in settled.because


def test_leaders_swap_before_a_replica_moves() -> None:
    """Also where a replica that is read, and does not lead, could move as well: it would be copied."""
    state = chosen(cluster("abcd", 8))
    hot = led_by(state, "a")[:2]
    followed = next(
        key
        for key, each in state.partitions.items()
        if each.preferred_leader != "a" and "a" in [replica.node for replica in each.replicas]
    )
    read = Load(read_bytes_per_s=200 * MI)
    reports = reports_of(state, dict.fromkeys(hot, read))
    mine = [
        replace(each, load=read) if each.partition == followed else each for each in reports["a"].partitions
    ]
    reports["a"] = replace(reports["a"], total=reports["a"].total + read, partitions=mine)
    without_leaders = replace(reports["a"], partitions=[each for each in mine if each.partition == followed])
    only = decide(state, Wanted(state), reports | {"a": without_leaders}, threshold=1.25)
    assert isinstance(only.move, PinPartition)

    assert isinstance(decide(state, Wanted(state), reports, threshold=1.25).move, PreferLeaders)


def test_no_replica_moves_to_a_node_that_would_be_given_the_lead_with_it() -> None:
    """Else that node's load, and the scores, would not be those that the move was chosen for."""
    state = chosen(cluster("abc", 4, replicas=2))

    def placed(key: str, nodes: str, leader: str) -> dict[str, PartitionRecord]:
        replicas = [ReplicaRecord(ord(each), each, each.encode() * 16, made=True) for each in nodes]
        pin = Pin(list(nodes), OWNER, "test")
        each = replace(state.partitions[key], pin=pin, replicas=replicas, preferred_leader=leader)
        return {key: each}

    ab = placed("t/0", "ab", "b") | placed("t/1", "ab", "b") | placed("t/2", "ab", "a")
    for last, movable in ((placed("t/3", "bc", "c"), True), (placed("t/3", "bc", "b"), False)):
        given = replace(state, partitions=state.partitions | ab | last)
        reports = reports_of(given, dict.fromkeys(given.partitions, Load(stored_bytes=900_000 * MI)))
        reports |= {name: replace(reports[name], total=Load(), partitions=[]) for name in "bc"}
        decision = decide(given, Wanted(given), reports, threshold=1.25)
        assert isinstance(decision.move, PinPartition) == movable, decision
        assert decision.because.endswith("leaves the other leaders where they are") != movable


def test_the_score_that_a_swap_is_chosen_for_is_the_one_that_follows() -> None:
    state = chosen(cluster("ab", 8, replicas=2))
    loads = {
        key: heavy(100 if each.preferred_leader == "a" else 50) for key, each in state.partitions.items()
    }
    decision = decided(state, loads)
    after = perform(state, decision)
    assert decision.because.endswith(f"then at most {scores(after, loads)[0]:.2f}")


def test_a_partition_that_is_being_handed_over_is_not_moved() -> None:
    """Its load is still counted where it was."""
    state = chosen(cluster("abc", 6))
    hot, warm = led_by(state, "a")
    reports = reports_of(state, {hot: heavy(300), warm: heavy(200)})
    other = led_by(state, "b")[0]
    swapped = {hot: "b", other: "a"}
    changed = {key: replace(state.partitions[key], preferred_leader=name) for key, name in swapped.items()}
    state = replace(state, partitions=state.partitions | changed)
    decision = decide(state, Wanted(state), reports, threshold=1.25)
    assert decision.move is not None and not swapped.keys() & set(decision.partitions)


def test_below_the_threshold_nothing_moves_and_the_answer_says_so() -> None:
    state = chosen(cluster("abc", 6))
    decision = decided(state, {key: heavy(100) for key in state.partitions})
    assert decision.move is None and decision.because == "largest score 1.00 (a) is not above 1.25"


def test_one_hot_partition_alone_is_not_passed_around() -> None:
    state = chosen(cluster("abc", 3))
    decision = decided(state, {led_by(state, "a")[0]: heavy(500)})
    assert decision.move is None and "no move lowers that" in decision.because


def test_a_partition_that_is_not_reported_is_swapped_as_a_quiet_one() -> None:
    """A report names 64 partitions, and the quietest are not among them."""
    state = chosen(cluster("abc", 210))
    mine = led_by(state, "a")
    loads = {key: heavy(2) for key in state.partitions} | {mine[0]: heavy(400), mine[1]: heavy(400)}
    reports = reports_of(state, loads)
    reported = {each.partition for name in "bc" for each in reports[name].partitions} - set(mine[:2])
    decision = decided(state, loads, resting=reported)
    assert isinstance(decision.move, PreferLeaders), decision
    assert not reported & set(decision.partitions) and mine[0] in decision.partitions


def test_stored_bytes_move_by_a_replica_with_a_pin_that_says_why() -> None:
    state = chosen(cluster("abcd", 8, replicas=1))
    full = led_by(state, "a")
    assert len(full) >= 2
    loads = {key: Load(stored_bytes=900_000 * MI) for key in full[:2]}
    decision = decided(state, loads)
    move = decision.move
    assert isinstance(move, PinPartition) and move.pin is not None and move.pin.owner == OWNER
    assert move.partition in full[:2] and move.pin.nodes != ["a"]
    assert "stored_bytes" in move.pin.reason and len(move.pin.reason) <= 200
    after = perform(state, decision)
    assert scores(after, loads)[0] <= scores(state, loads)[0] - MARGIN
    assert decided(after, loads).move is None


def test_a_node_whose_disk_is_low_gets_no_replica() -> None:
    state = chosen(cluster("abc", 8, replicas=1))
    full = led_by(state, "a")[:2]
    assert len(full) == 2
    loads = {key: Load(stored_bytes=900_000 * MI) for key in full}
    reports = reports_of(state, loads)
    assert decide(state, Wanted(state), reports, threshold=1.25).move is not None
    low = {name: replace(report, disk_is_low=True) for name, report in reports.items()}
    assert decide(state, Wanted(state), low, threshold=1.25).move is None


def test_a_replica_stays_in_as_many_zones() -> None:
    state = chosen(cluster("abcd", 2, replicas=2))
    zones = {"a": "x", "b": "y", "c": "x", "d": "x"}
    nodes = {name: replace(node(name), zone=zone) for name, zone in zones.items()}
    pinned = {
        key: replace(
            each,
            pin=Pin(["a", "b"], OWNER, "test"),
            replicas=[ReplicaRecord(n, name, name.encode() * 16, made=True) for n, name in enumerate("ab")],
            preferred_leader="ab"[each.number],
        )
        for key, each in state.partitions.items()
    }
    state = replace(state, nodes=nodes, partitions=pinned)
    reports = reports_of(state, dict.fromkeys(state.partitions, Load(stored_bytes=900_000 * MI)))
    # Only b is hot now: if a replica of it went to c or d, both would be in one zone.
    reports["a"] = replace(reports["a"], total=Load(), partitions=[])
    assert decide(state, Wanted(state), reports, threshold=1.25).move is None
    elsewhere = replace(state, nodes=nodes | {"d": replace(node("d"), zone="z")})
    move = decide(elsewhere, Wanted(elsewhere), reports, threshold=1.25).move
    assert isinstance(move, PinPartition) and (move.pin is None or move.pin.nodes == ["a", "d"])


def test_a_leading_replica_of_several_is_not_moved() -> None:
    """Which node would lead next is not known, so neither is what the move would do."""
    state = chosen(cluster("abcd", 1))
    (leader,) = counts(state)
    loads = {"t/0": heavy(500)}
    decision = decided(state, loads)
    assert decision.scores[leader].value > 1.25
    move = decision.move
    if move is not None:
        assert isinstance(move, PinPartition) and move.pin is not None and leader in move.pin.nodes

    for number in range(2, 12):
        state = chosen(cluster("abcd", number, replicas=2))
        full = dict.fromkeys(led_by(state, "a"), Load(stored_bytes=900_000 * MI))
        move = decided(state, full).move
        if isinstance(move, PinPartition) and move.pin is not None:
            assert state.partitions[move.partition].preferred_leader in move.pin.nodes


def test_a_pin_of_an_operator_and_a_partition_that_moved_lately_are_left_alone() -> None:
    state = chosen(cluster("abcd", 8, replicas=1))
    full = led_by(state, "a")[:2]
    loads = {key: Load(stored_bytes=900_000 * MI) for key in full}
    pinned = {key: replace(state.partitions[key], pin=Pin(["a"], "operator", "here")) for key in full}
    by_hand = replace(state, partitions=state.partitions | pinned)
    assert decided(by_hand, loads).move is None
    assert decided(state, loads, resting=full).move is None


# -- pins of our own ---------------------------------------------------------------------


def test_a_pin_of_ours_is_lifted_when_nothing_would_be_hot_without_it() -> None:
    state = chosen(cluster("abcd", 8, replicas=1))
    full = led_by(state, "a")[:2]
    loads = {key: Load(stored_bytes=900_000 * MI) for key in full}
    moved = perform(state, decided(state, loads))
    (pinned,) = (key for key, each in moved.partitions.items() if each.pin is not None)
    assert decided(moved, loads).move is None
    # Both nodes are below this threshold, and one would be above it without the pin.
    assert decided(moved, loads, threshold=2.1).move is None
    calm = decided(moved, {})
    assert calm.move == PinPartition(pinned, moved.partitions[pinned].version, None)
    assert decided(moved, {}, resting=[pinned]).move is None
    home = perform(moved, calm)
    assert {k: [r.node for r in p.replicas] for k, p in home.partitions.items()} == {
        k: [r.node for r in p.replicas] for k, p in state.partitions.items()
    }
    by_hand = replace(moved.partitions[pinned], pin=Pin(["b"], "operator", "here"))
    by_hand = replace(by_hand, replicas=[replace(by_hand.replicas[0], node="b")], preferred_leader="b")
    assert decided(replace(moved, partitions=moved.partitions | {pinned: by_hand}), {}).move is None


def test_a_pin_of_ours_that_contradicts_the_topic_or_the_nodes_is_stale() -> None:
    """Else it would hold up a topic that grows, or a drain's end."""
    base = cluster("abcd", 1)
    partition = replace(base.partitions["t/0"], pin=Pin(["a", "b", "c"], OWNER, "1.50, now 1.20"))
    state = replace(base, partitions={"t/0": partition})
    assert stale_pins(state) == []
    more = replace(state, topics={"t": replace(state.topics["t"], replicas=4)})
    draining = replace(state, nodes=state.nodes | {"b": replace(node("b"), draining=True)})
    lift = [PinPartition("t/0", partition.version, None)]
    assert stale_pins(more) == lift and stale_pins(draining) == lift
    operators = replace(partition, pin=Pin(["a", "b"], "operator", "here"))
    assert stale_pins(replace(state, partitions={"t/0": operators})) == []


# -- when nothing may move ---------------------------------------------------------------


def test_nothing_moves_beside_an_incomplete_placement_or_an_absent_or_silent_node() -> None:
    state = chosen(cluster("abcd", 4))
    reports = reports_of(state, {})

    def why(changed: CatalogState = state, **more: Any) -> str:
        seen = more.pop("reports", reports)
        return obstacle(changed, Wanted(changed), seen, absent=more.pop("absent", ()))

    def with_first(**fields: Any) -> CatalogState:
        return replace(
            state, partitions=state.partitions | {"t/0": replace(state.partitions["t/0"], **fields)}
        )

    replicas = state.partitions["t/0"].replicas
    assert why() == ""
    assert why(absent={"c"}).startswith("nodes are absent: c;")
    drained = replace(state, nodes=state.nodes | {"z": replace(node("z"), draining=True)})
    assert why(drained, absent={"z"}) == ""
    draining = replace(state, nodes=state.nodes | {"c": replace(node("c"), draining=True)})
    assert why(draining, absent={"c"}).startswith("nodes are absent: c;")
    assert why(reports={name: reports[name] for name in "abd"}) == "no load is reported yet by c"
    assert why(with_first(state="creating")) == "replicas of t/0 are being made or moved"
    leaving = [LeavingReplica(replicas[0], "moved")]
    assert why(with_first(leaving=leaving)) == "replicas of t/0 are being made or moved"
    unmade = [replace(replicas[0], made=False), *replicas[1:]]
    assert why(with_first(replicas=unmade)) == "replicas of t/0 are being made or moved"
    lost = [replace(replicas[0], lost=True), *replicas[1:]]
    assert why(with_first(replicas=lost)) == "t/0 has lost a replica"
    assert why(with_first(replicas=replicas[:2])) == "t/0 has fewer replicas than it should have"
    other = next(iter(state.nodes.keys() - {each.node for each in replicas}))
    pin = Pin([other, *(each.node for each in replicas[1:])], "operator", "there")
    assert why(with_first(pin=pin)) == "t/0 is not on the nodes that it should be on"


def test_hours_wrap_around_midnight_and_the_last_one_is_not_allowed() -> None:
    assert [hour for hour in range(24) if allowed_at("22-02", hour)] == [0, 1, 22, 23]
    assert [hour for hour in range(24) if allowed_at("01-03", hour)] == [1, 2]
    assert all(allowed_at("", hour) and allowed_at("05-05", hour) for hour in range(24))


# -- rest --------------------------------------------------------------------------------

_amounts = st.sampled_from([0.0, 0.0, 0.0, 1.0, 10.0, 100.0, 1000.0])


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_constant_load_comes_to_rest_in_few_moves_and_no_placement_comes_back(data: st.DataObject) -> None:
    nodes = data.draw(st.sampled_from(["ab", "abc", "abcde"]))
    replicas = data.draw(st.integers(1, min(3, len(nodes))))
    number = data.draw(st.integers(1, 16))
    state = chosen(cluster(nodes, number, replicas=replicas))
    loads = {
        key: Load(
            appended_bytes_per_s=(appended := data.draw(_amounts)) * MI,
            written_bytes_per_s=appended * MI,
            read_bytes_per_s=data.draw(_amounts) * MI,
            requests_per_s=data.draw(_amounts),
            stored_bytes=data.draw(_amounts) * 1000 * MI,
        )
        for key in sorted(state.partitions, key=lambda key: int(key.partition("/")[2]))
    }
    known = [state.partitions]
    kinds: Counter[str] = Counter()
    for _ in range(4 * number + 8):
        decision = decided(state, loads)
        if decision.move is None:
            break
        before = scores(state, loads)
        state = perform(state, decision)
        after = scores(state, loads)
        kinds[type(decision.move).__name__] += 1
        if not (isinstance(decision.move, PinPartition) and decision.move.pin is None):
            assert after < before, decision.because
        assert _places(state.partitions) not in map(_places, known), decision.because
        known.append(state.partitions)
    else:
        raise AssertionError(f"no rest after {kinds}")


def _places(partitions: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: (each.preferred_leader, sorted(replica.node for replica in each.replicas), each.pin)
        for key, each in partitions.items()
    }
