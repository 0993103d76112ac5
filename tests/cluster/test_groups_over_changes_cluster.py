"""A group goes over changes of the route on three nodes, while members and nodes die."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import laminar
from laminar.testing.cluster import LocalCluster
from tests.client.keyed import KEYS, Keyed, check, read_all
from tests.client.members import MemberProcess, ended, until

TOPIC = "orders"


def test_a_group_of_three_goes_over_changes_while_nodes_and_members_die(cluster: LocalCluster) -> None:
    """Split, merge and move; in each one node is killed, and one member: no order lost, no record."""
    go_over(cluster, seed=1, changes=3)


def go_over(cluster: LocalCluster, *, seed: int, changes: int) -> int:
    """Carry out so many random changes under load; return how many records were read and checked."""
    rng = random.Random(seed)
    with laminar.connect(cluster.urls, timeout=60) as client:
        client.create_topic(TOPIC, partitions=2, replicas=3)
        handle = client.topic(TOPIC)
        members = [MemberProcess(cluster.urls, TOPIC, "g") for _ in range(3)]
        living = list(members)
        with ended(members), Keyed(cluster.urls, TOPIC, pause_s=0.25) as sending:
            until(lambda: sum(len(member.read) for member in members) > 3 * KEYS, "they read")
            for number in range(changes):
                ranges = handle.route().ranges
                steps: list[Callable[[], laminar.RouteInfo]] = [
                    lambda ranges=ranges: handle.move(rng.choice(list(ranges)))  # type: ignore[misc]
                ]
                if len(ranges) < 4:
                    steps.append(lambda ranges=ranges: handle.split(rng.choice(list(ranges))))  # type: ignore[misc]
                if len(ranges) > 1:
                    pair = rng.randrange(len(ranges) - 1)
                    steps.append(
                        lambda ranges=ranges, pair=pair: handle.merge(  # type: ignore[misc]
                            sorted(ranges, key=lambda each: ranges[each].start)[pair : pair + 2]
                        )
                    )
                new = steps[number % len(steps)]()
                node = rng.randrange(3)
                cluster.kill(node)
                living.pop(rng.randrange(len(living))).kill()
                changed_s = time.monotonic()
                living.append(MemberProcess(cluster.urls, TOPIC, "g"))
                members.append(living[-1])
                cluster.restart(node)
                until(
                    lambda new=new, since_s=changed_s: (  # type: ignore[misc]
                        set(new.ranges)
                        <= {place[0] for member in members for place in member.read_since(since_s)}
                    ),
                    f"{set(new.ranges)} are read",
                )
            count = sending.end()
            until(read_all(members, count), "all is read")
            check(members, count)
    return count * KEYS
