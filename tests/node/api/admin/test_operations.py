"""Operations are differences between what the catalog wants and what it records: nothing else makes one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from laminar.http.api.documents.administration import Operation
from laminar.node.api.admin.operations import Operations, UnderWay, blocks_of_drain
from laminar.node.placement.wanted import wanted_nodes
from membership.records import CatalogState, LeavingReplica, PartitionRecord, Pin, ReplicaRecord
from tests.membership.nodes import node, state_of
from tests.node.services import Services

T = TypeVar("T")


class InThread(Services):
    """Services that count what they run in a thread."""

    def __init__(self) -> None:
        """Let each job end at once, while `may_end` is set."""
        super().__init__()
        self.jobs = 0
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def off_loop(self, job: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """See `ShardServices`."""

        def run() -> T:
            assert threading.current_thread() is not threading.main_thread()
            self.begun.set()
            assert self.may_end.wait(60)
            return job(*arguments)

        self.jobs += 1
        return super().off_loop(run)


def under_way(state: CatalogState, *, dead: str = "") -> dict[str, Operation]:
    alive = state.nodes.keys() - set(dead)
    return {each.id: each for each in Operations().of(state, alive=alive)}


def with_partition(state: CatalogState, **fields: Any) -> CatalogState:
    return replace(state, partitions={"t/0": replace(state.partitions["t/0"], **fields)})


def with_node(state: CatalogState, name: str, **fields: Any) -> CatalogState:
    return replace(state, nodes=state.nodes | {name: replace(state.nodes[name], **fields)})


def on(*nodes: str, made: bool = True) -> list[ReplicaRecord]:
    return [ReplicaRecord(n + 1, name, name.encode() * 16, made=made) for n, name in enumerate(nodes)]


def test_nothing_is_under_way_where_all_is_as_wanted() -> None:
    assert {} == under_way(state_of(*"abc"))


def test_a_drain_counts_the_partitions_that_do_without_the_node() -> None:
    """Until the last replica has left, not only joined elsewhere."""
    draining = with_node(state_of(*"abcd"), "a", draining=True)

    begun = under_way(draining)["drain:a"]
    moving = with_partition(
        draining, replicas=on("d", "b", "c"), leaving=[LeavingReplica(on("a")[0], "moved")]
    )
    half = under_way(moving)["drain:a"]
    done = under_way(with_partition(draining, replicas=on("d", "b", "c")))["drain:a"]

    assert ("drain", "a", 0, 1, []) == (begun.kind, begun.what, begun.done, begun.total, begun.blocked_by)
    assert (0, 1) == (half.done, half.total)
    assert (1, 1) == (done.done, done.total)
    assert "move:t:0" not in under_way(draining), "the drain says it already"


def test_a_drain_that_would_leave_too_few_nodes_says_how_many_are_asked_for() -> None:
    draining = with_node(state_of(*"abc"), "a", draining=True)

    assert ["3 replicas are asked for, 2 nodes would be left (topic t)"] == under_way(draining)[
        "drain:a"
    ].blocked_by


def test_a_drain_waits_for_nodes_that_are_not_alive() -> None:
    """Those that could take the replicas, and those that hold the others."""
    draining = with_node(state_of(*"abcd"), "a", draining=True)

    assert ["the nodes that could take its replicas are not alive: d"] == blocks_of_drain(
        draining, "a", alive=set("abc")
    )
    assert ["partitions do not move while another of their nodes is not alive: b"] == blocks_of_drain(
        draining, "a", alive=set("acd")
    )


@pytest.mark.parametrize(
    ("asked", "blocked"), [(2, []), (4, ["4 replicas are asked for, 3 nodes may hold replicas"])]
)
def test_a_topic_with_more_or_fewer_replicas_than_asked_for_is_one(asked: int, blocked: list[str]) -> None:
    state = state_of(*"abc")
    altered = replace(state, topics={"t": replace(state.topics["t"], replicas=asked)})

    (found,) = under_way(altered).values()

    assert ("replicas:t", "t", 0, 1, blocked) == (
        found.id,
        found.what,
        found.done,
        found.total,
        found.blocked_by,
    )
    assert f"asks for {asked} replicas" in found.why
    assert "PATCH /v1/topics/t" in found.cancel


def test_a_pin_is_one_until_its_nodes_and_no_others_hold_the_partition() -> None:
    pin = Pin(["b", "c", "d"], "operator", "the disks of a are slow")
    state = state_of(*"abcd")

    begun = under_way(with_partition(state, pin=pin))["pin:t:0"]
    reached = under_way(with_partition(state, pin=pin, replicas=on("b", "c", "d")))
    unmade = under_way(with_partition(state, pin=pin, replicas=on("b", "c", "d", made=False)))

    assert (2, 3, "pinned by operator: the disks of a are slow") == (begun.done, begun.total, begun.why)
    assert {} == reached
    assert {"pin:t:0", "join:t:0:1", "join:t:0:2", "join:t:0:3"} == unmade.keys()


def test_a_topic_that_grows_is_one_until_its_new_replicas_are_made() -> None:
    """One that moves is not: a replica leaves for the one that joins."""
    joining = [*on("a", "b"), ReplicaRecord(3, "c", b"c" * 16)]
    growing = with_partition(state_of(*"abc"), replicas=joining)
    moving = with_partition(growing, leaving=[LeavingReplica(ReplicaRecord(9, "x", b"x" * 16), "moved")])

    assert (0, 1) == (under_way(growing)["replicas:t"].done, under_way(growing)["replicas:t"].total)
    assert "replicas:t" not in under_way(moving)


def test_a_pin_to_a_node_that_is_dead_or_drains_says_so() -> None:
    pin = Pin(["b", "c", "d"], "operator", "test")
    state = with_node(with_partition(state_of(*"abcd"), pin=pin), "d", draining=True)

    assert ["node d is not alive", "node d may hold no replicas"] == under_way(state, dead="d")[
        "pin:t:0"
    ].blocked_by


def test_a_partition_beside_its_wanted_set_is_one() -> None:
    """Here by a node that has joined and has the better rank."""
    state = state_of(*"abc")
    names = [f"n{number}" for number in range(50)]
    grown = replace(state, nodes=state.nodes | {name: node(name) for name in names})
    wanted = wanted_nodes(grown, grown.partitions["t/0"])
    assert {"a", "b", "c"} != set(wanted)

    found = under_way(grown)["move:t:0"]

    assert (len({"a", "b", "c"} & set(wanted)), 3) == (found.done, found.total)
    assert all(name in found.why for name in wanted)
    assert {} == under_way(with_partition(grown, replicas=on(*wanted)))


def test_replicas_that_join_and_leave_say_why() -> None:
    """A replica of a partition that is being created does not: its creation waits for it."""
    state = state_of(*"abcd")
    replicas = [*on("a", "b"), ReplicaRecord(9, "d", b"d" * 16)]
    moving = with_partition(
        state, replicas=replicas, leaving=[LeavingReplica(on("a", "b", "c")[2], "moved")], why="c is draining"
    )

    found = under_way(moving, dead="d")

    assert ("t/0 on d", "c is draining", ["node d is not alive"]) == (
        found["join:t:0:9"].what,
        found["join:t:0:9"].why,
        found["join:t:0:9"].blocked_by,
    )
    assert ("t/0 on c", "c is draining") == (found["leave:t:0:3"].what, found["leave:t:0:3"].why)
    new = PartitionRecord("t", 0, b"g" * 16, "creating", on("a", "b", "c", made=False), 1)
    assert {} == under_way(replace(state_of(*"abc"), partitions={"t/0": new}))


async def test_operations_are_computed_in_a_thread_and_again_only_when_something_has_changed() -> None:
    """A state of the catalog, or which nodes are alive; requests at the same time share one pass."""
    services = InThread()
    message = services.view.message
    assert message is not None
    message.catalog, message.statuses = state_of(*"abc"), dict.fromkeys("abc", "alive")
    under_way = UnderWay(services)

    first, shared = await asyncio.gather(under_way.get(), under_way.get())
    jobs = [services.jobs]
    message.catalog = replace(message.catalog, version=message.catalog.version + 1)
    same = await under_way.get()
    jobs.append(services.jobs)
    message.catalog = with_partition(message.catalog, replicas=on("a", "b"))
    grown = await under_way.get()
    jobs.append(services.jobs)
    message.statuses["c"] = "dead"
    blocked = await under_way.get()
    jobs.append(services.jobs)

    assert [1, 1, 2, 3] == jobs
    assert [] == first
    assert first is shared is same
    assert ["replicas:t"] == [each.id for each in grown] == [each.id for each in blocked]
    message.catalog = with_node(message.catalog, "a", draining=True)
    assert ["drain:a", "replicas:t"] == [each.id for each in await under_way.get()]


async def test_what_a_client_that_goes_away_began_ends_before_another_pass_begins() -> None:
    """Two passes at a time would change the same cache of wanted nodes from two threads."""
    services = InThread()
    message = services.view.message
    assert message is not None
    message.catalog, message.statuses = state_of(*"abc"), dict.fromkeys("abc", "alive")
    under_way = UnderWay(services)

    services.may_end.clear()
    gone = asyncio.create_task(under_way.get())
    assert await asyncio.to_thread(services.begun.wait, 60)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    message.catalog = with_partition(message.catalog, replicas=on("a", "b"))
    other = asyncio.create_task(under_way.get())
    for _ in range(10):
        await asyncio.sleep(0)
    jobs = services.jobs
    services.may_end.set()
    found = await other

    assert (1, 2) == (jobs, services.jobs)
    assert ["replicas:t"] == [each.id for each in found]
