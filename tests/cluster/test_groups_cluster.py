"""Groups of consumers over three nodes: who keeps the roster may die, too."""

from __future__ import annotations

import time

import mmh3

import laminar
from laminar.testing.cluster import LocalCluster
from tests.client.members import MemberProcess, Place, Writing, check, ended, until
from tests.cluster.load import leaders

PARTITIONS = 4
ALL = set(range(PARTITIONS))


def leader_of_roster(cluster: LocalCluster, topic: str, group: str) -> int:
    """Which member of the cluster leads the partition that keeps the group's roster."""
    number = mmh3.hash(group.encode(), 0, signed=False) % PARTITIONS
    name = leaders(cluster.urls[0], topic)[number]
    return next(at for at, node in enumerate(cluster.members) if node.name == name)


def test_a_group_goes_on_when_the_node_that_keeps_its_roster_dies(cluster: LocalCluster) -> None:
    """kill -9 of the roster's leader, then of a member: nothing skipped, nothing committed read twice."""
    with laminar.connect(cluster.urls, timeout=30) as client:
        client.create_topic("orders", partitions=PARTITIONS, replicas=3)
    members = [MemberProcess(cluster.urls, "orders", "billing", session_s=4, every=3) for _ in range(3)]
    with ended(members), Writing(cluster.urls, "orders", PARTITIONS) as writing:
        until(lambda: all(member.joined for member in members), "all join")
        until(lambda: sum(len(member.read) for member in members) > 30, "records are read")
        cluster.kill(leader_of_roster(cluster, "orders", "billing"))
        killed_s = time.monotonic()
        until(lambda: {place[0] for m in members for place in m.read_since(killed_s + 0.5)} == ALL, "reading")
        members[0].kill()
        killed_s = time.monotonic()
        until(
            lambda: {place[0] for m in members for place in m.read_since(killed_s)} == ALL, "all partitions"
        )
        ends = writing.end()
        total = sum(ends.values())
        until(lambda: len(set[Place]().union(*(each.places for each in members))) == total, "all is read")
        check(members, ends)


def test_a_group_that_chooses_by_tag_goes_on_over_kills_and_restarts(cluster: LocalCluster) -> None:
    """Of a node, and of a member: each chosen record, and what is left out is committed with them."""
    with laminar.connect(cluster.urls, timeout=30) as client:
        client.create_topic("orders", partitions=PARTITIONS, replicas=3)
    members = [MemberProcess(cluster.urls, "orders", "paid", every=2, tag="paid") for _ in range(3)]
    with ended(members), Writing(cluster.urls, "orders", PARTITIONS, tags=("paid", "new", None)) as writing:
        until(lambda: sum(len(member.read) for member in members) > 30, "records are read")
        killed = leader_of_roster(cluster, "orders", "paid")
        cluster.kill(killed)
        members[0].kill()
        killed_s = time.monotonic()
        until(lambda: {place[0] for m in members for place in m.read_since(killed_s + 1)} == ALL, "reading")
        cluster.restart(killed)
        members.append(MemberProcess(cluster.urls, "orders", "paid", every=1, tag="paid"))
        # Whether it is given a partition now is left to its name: there are more partitions than members.
        until(lambda: members[3].joined, "a new member joins")
        ends = writing.end()
        total = sum(len(range(0, end, 3)) for end in ends.values())
        until(lambda: len(set[Place]().union(*(each.places for each in members))) == total, "all is read")
        check(members, ends, every=3)
        # Who committed all it has commits what is left out behind it, too.
        for member in members[1:3]:
            member.close()
        with laminar.connect(cluster.urls, timeout=30) as client:
            handle = client.topic("orders")
            until(lambda: handle.describe_cursor("paid").total_lag == 0, "all is passed")
