"""Rules of placement, ownership and steering: deterministic, fair, and nothing moves that need not."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from router import owner_shard, partition_hash, place, rank, shard_of_source_port
from router.placement import score

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())

hashes = st.integers(0, 2**32 - 1)
node_names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
weights = st.floats(0.01, 1000)
clusters = st.dictionaries(node_names, weights, min_size=1, max_size=12)


def murmur3_x86_32(data: bytes, seed: int = 0) -> int:
    """The slow, obvious twin of the C hash: MurmurHash3_x86_32, integers only, as in the kernel."""
    mask = 0xFFFFFFFF
    h = seed
    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
        h = (h << 13 | h >> 19) & mask
        h = (h * 5 + 0xE6546B64) & mask
    tail = int.from_bytes(data[whole:], "little")
    if tail:
        k = tail * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ h >> shift) * factor & mask
    return h


def test_partition_hashes_match_the_golden_vectors() -> None:
    """A partition's hash is part of the format: it never changes."""
    assert GOLDEN["partition_hash"] == [[t, n, partition_hash(t, n)] for t, n, _ in GOLDEN["partition_hash"]]


def test_owner_shards_match_the_golden_vectors() -> None:
    """The kernel's programs are held to the same file."""
    assert GOLDEN["owner_shard"] == [[h, s, owner_shard(h, s)] for h, s, _ in GOLDEN["owner_shard"]]


def test_ranks_match_the_golden_vectors() -> None:
    """The same names and weights give the same order in every version of the code."""
    assert [case["rank"] for case in GOLDEN["rank"]] == [
        rank(case["partition_hash"], case["weights"]) for case in GOLDEN["rank"]
    ]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30), hashes)
def test_the_partition_hash_is_plain_murmur3_of_name_zero_number(topic: str, number: int) -> None:
    """Any implementation of murmur3 can compute it from docs alone."""
    data = topic.encode() + b"\0" + number.to_bytes(4, "little")

    assert murmur3_x86_32(data) == partition_hash(topic, number)


@given(hashes, st.integers(1, 64))
def test_the_owner_is_the_highest_draw_and_a_tie_goes_to_the_lower_shard(hash_: int, shards: int) -> None:
    """Against the slow twin: max() keeps the first of equals, which is the lower shard."""
    draws = [murmur3_x86_32(hash_.to_bytes(4, "little") + s.to_bytes(4, "little")) for s in range(shards)]

    assert draws.index(max(draws)) == owner_shard(hash_, shards)


@given(hashes, st.integers(1, 64))
def test_a_further_shard_takes_partitions_only_for_itself(hash_: int, shards: int) -> None:
    """From n shards to n + 1 a partition stays or goes to the new one; backwards only the last one's move."""
    before, after = owner_shard(hash_, shards), owner_shard(hash_, shards + 1)

    assert after in (before, shards)


def test_shards_of_a_node_own_equal_shares() -> None:
    """Over 40,000 partitions of 8 shards each share is within 4 standard deviations (66 of 5,000)."""
    owned = Counter(owner_shard(partition_hash("events", n), 8) for n in range(40_000))

    assert set(range(8)) == set(owned)
    assert all(abs(count - 5_000) < 4 * 66.1 for count in owned.values()), owned


def test_even_source_ports_reach_every_shard_equally() -> None:
    """Linux hands out even ports to connect(); each of 1, 2, 3 and 8 shards gets its share of them."""
    for shards in (1, 2, 3, 8):
        reached = Counter(shard_of_source_port(port, shards) for port in range(32768, 61000, 2))

        assert set(range(shards)) == set(reached)
        assert max(reached.values()) - min(reached.values()) <= 1


@given(hashes, clusters, st.integers(0, 15), st.randoms(use_true_random=False))
def test_place_is_a_function_of_the_members_alone(
    hash_: int, cluster: dict[str, float], k: int, rng: random.Random
) -> None:
    """The order in which members are known changes nothing; a large k gives them all, once each."""
    shuffled = list(cluster.items())
    rng.shuffle(shuffled)

    placed = place(hash_, dict(shuffled), k)

    assert placed == place(hash_, cluster, k)
    assert len(placed) == min(k, len(cluster)) == len(set(placed))
    assert placed == rank(hash_, cluster)[:k]


@given(hashes, clusters, node_names, weights)
def test_a_join_leaves_the_order_of_all_others(
    hash_: int, cluster: dict[str, float], name: str, weight: float
) -> None:
    """Joining, leaving and changing weight move one node through the rank and swap no two others."""
    changed = cluster | {name: weight}

    before = [node for node in rank(hash_, cluster) if node != name]
    after = [node for node in rank(hash_, changed) if node != name]

    assert before == after


@given(hashes, clusters, node_names, weights, st.integers(1, 5))
def test_a_leave_replaces_only_what_the_leaver_held(
    hash_: int, cluster: dict[str, float], name: str, weight: float, k: int
) -> None:
    """A partition that the leaver didn't hold stays where it is; one that it held gets the next in rank."""
    with_it = cluster | {name: weight}
    without = {node: w for node, w in cluster.items() if node != name}

    before, after = place(hash_, with_it, k), place(hash_, without, k)

    if name not in before:
        assert before == after
    else:
        assert [node for node in before if node != name] == after[: len(before) - 1]


@given(hashes, node_names, weights, st.floats(1.01, 100))
def test_more_weight_never_lowers_a_score(hash_: int, name: str, weight: float, factor: float) -> None:
    """So a node that grows only gains partitions and one that shrinks only loses them."""
    assert score(hash_, name, weight * factor) > score(hash_, name, weight) > 0


def test_first_places_are_proportional_to_the_weights() -> None:
    """Over 20,000 partitions, weights 1, 2, 3 and 4 get 10, 20, 30, 40 % within 4 standard deviations."""
    partitions = 20_000
    cluster = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}

    firsts = Counter(place(partition_hash("t", n), cluster, 1)[0] for n in range(partitions))

    for node, weight in cluster.items():
        share = weight / 10
        deviation = (partitions * share * (1 - share)) ** 0.5
        assert abs(firsts[node] - partitions * share) < 4 * deviation, (node, firsts)


def test_equal_weights_hold_equal_numbers_of_replicas() -> None:
    """Ten equal nodes and three replicas: each holds 30 % of the partitions within 4 standard deviations."""
    partitions = 10_000
    cluster = {f"node-{i}": 1.0 for i in range(10)}

    held = Counter(node for n in range(partitions) for node in place(partition_hash("t", n), cluster, 3))

    deviation = (partitions * 0.3 * 0.7) ** 0.5
    assert all(abs(count - 3_000) < 4 * deviation for count in held.values()), held


def test_a_joining_node_takes_its_share_and_no_more() -> None:
    """An eleventh equal node takes 3/11 of the partitions' places; nothing moves between the old ten."""
    partitions = 5_000
    ten = {f"node-{i}": 1.0 for i in range(10)}
    eleven = ten | {"node-10": 1.0}
    moved = 0

    for n in range(partitions):
        before = set(place(partition_hash("t", n), ten, 3))
        after = set(place(partition_hash("t", n), eleven, 3))
        assert after - before <= {"node-10"}
        moved += len(after - before)

    expected = partitions * 3 / 11
    assert abs(moved - expected) < 4 * (partitions * 3 / 11 * 8 / 11) ** 0.5


def test_a_node_of_weight_zero_is_never_placed() -> None:
    """Weight 0 is a node being emptied: it is not in the rank at all."""
    assert all(
        place(partition_hash("t", n), {"a": 1.0, "b": 0.0, "c": 0.5}, 3) in (["a", "c"], ["c", "a"])
        for n in range(100)
    )
