"""Replicas that may have forgotten acknowledgements, in a whole cluster (docs/consensus.md#recovering)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from laminar.node.catalog import controller_addresses
from laminar.node.catalog.controller import REMEMBER_MS
from laminar.node.consensus.replica import Replica
from laminar.node.partition.partition import Partition
from raft.values import Role
from tests.sim.clients import Client
from tests.sim.machine import Machine
from tests.sim.simulation import TOPIC, _gather, _serve, begin
from tests.sim.watch import Watch
from tests.sim.world import Options, World

FIRST_JOURNAL = "data/controller/journal-1"
RECOVER = f"/v1/topics/{TOPIC}/partitions/0/recover"


class Scene:
    """Three nodes, a topic with `flush=interval` whose segments are hardly ever synced, and some records."""

    def __init__(self, *, flush: str = "interval", nodes: int = 3) -> None:
        settings: dict[str, int | str] = {"flush": flush}
        if flush == "interval":
            settings["flush_interval_ms"] = 60_000
        self.world = World(
            Options(seed=7, nodes=nodes, replicas=nodes, partitions=1, clients=1, topic_settings=settings)
        )
        self.watch = Watch(self.world)
        [self.client] = begin(self.world, self.watch)
        self.client.start(pause_s=0.1)
        self.until(lambda: self.client.acknowledged >= 20, "records")

    def until(self, condition: object, what: str, *, at_most_s: float = 60.0) -> None:
        assert callable(condition)
        assert self.world.loop.run_until(condition, at_most_s=at_most_s), f"never came: {what}"

    def partition(self, machine: Machine) -> Partition | None:
        shards = machine.shard_processes if machine.up else []
        return shards[0].partitions.get((TOPIC, 0)) if shards else None

    @property
    def leader(self) -> Machine | None:
        led = [each for each in self.world.up if (held := self.partition(each)) is not None and held.leads]
        return led[0] if led else None

    def sorted_out(self) -> tuple[Machine, Machine, Machine]:
        """The leader and the two others."""
        self.until(lambda: self.leader is not None, "a leader")
        leader = self.leader
        assert leader is not None
        one, other = [machine for machine in self.world.machines.values() if machine is not leader]
        return leader, one, other

    def whole(self) -> bool:
        """Everybody is up, unmarked, and holds the same."""
        return all(machine.holds_all() for machine in self.world.machines.values()) and self.watch.converged(
            TOPIC, 1, 3
        )

    def post(self, target: str) -> tuple[int, dict[str, Any]]:
        asking = Client(self.world, self.watch, 9, topic=TOPIC, partitions=1)

        async def ask() -> tuple[int, dict[str, Any]]:
            asking.connect()
            node = self.world.up[0].node
            answer = await asking.request(node, 0, "POST", target, {}, b"")
            return answer.status, msgspec.json.decode(answer.body) if answer.body else {}

        task = self.world.loop.start(asking.life, ask())
        self.until(task.done, "an answer")
        return task.result()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.world.close()


def test_pitfall_34_power_loss_of_one_of_three_loses_nothing(scene: Scene) -> None:
    """It comes back marked, as a new incarnation, whose match the leader counts anew; the mark falls."""
    leader, one, _ = scene.sorted_out()
    held = scene.partition(one)
    assert held is not None and held.log.last_index > 5
    one.cut_power(keep=0.0)
    one.start()
    scene.until(lambda: scene.partition(one) is not None, "its replica")
    found = scene.partition(one)
    leading = scene.partition(leader)
    assert found is not None and leading is not None
    assert found.replica.core.recovering and found.log.last_index < held.log.last_index
    assert found.log.incarnation == 1

    scene.until(lambda: not found.replica.core.recovering, "the end of its mark")
    progress = leading.replica.core.progress[found.replica.replica_id]
    assert progress.incarnation == 2
    assert not found.log.recovering
    scene.client.stopping = True
    scene.until(scene.whole, "the same everywhere")


def test_pitfall_34_when_two_of_three_forgot_the_third_is_waited_for(scene: Scene) -> None:
    """Its log holds what they acknowledged: nobody leads before it answers, then nothing is missing."""
    leader, one, other = scene.sorted_out()
    scene.client.stopping = True
    leader.kill()
    for machine in (one, other):
        machine.cut_power(keep=0.0)
        machine.start()
    scene.world.loop.run_for(30.0)
    assert scene.leader is None
    assert all(
        (held := scene.partition(each)) is not None and held.replica.core.recovering for each in (one, other)
    )

    leader.start()
    scene.until(scene.whole, "the same everywhere")


def test_after_power_was_lost_everywhere_all_groups_come_back_by_themselves(scene: Scene) -> None:
    """All three forgot; when all have answered, they go on from the latest of their logs. One that is away is
    waited for.
    """
    leader, one, other = scene.sorted_out()
    scene.client.stopping = True
    scene.world.losing()
    for machine in (leader, one, other):
        machine.cut_power(keep=0.5)
    for machine in (one, other):
        machine.start()
    scene.world.loop.run_for(30.0)
    assert scene.leader is None

    leader.start()
    scene.until(scene.whole, "the same everywhere")
    marked = [held.replica.core.recovering for each in scene.world.up if (held := scene.partition(each))]
    assert marked == [False] * 3


def test_an_only_replica_that_forgot_goes_on_by_itself() -> None:
    """Nobody else could object, and the catalog knows that."""
    world = World(
        Options(
            seed=3,
            nodes=1,
            partitions=1,
            clients=1,
            topic_settings={"flush": "interval", "flush_interval_ms": 60_000},
        )
    )
    watch = Watch(world)
    [client] = begin(world, watch)
    client.start(pause_s=0.1)
    assert world.loop.run_until(lambda: client.acknowledged >= 20, at_most_s=60.0)
    client.stopping = True
    [machine] = world.machines.values()
    world.losing()
    machine.cut_power(keep=0.0)
    machine.start()
    assert world.loop.run_until(
        lambda: machine.up and any(each.leads for _, each in watch.partitions(TOPIC, 0)), at_most_s=60.0
    ), "no leader"
    world.close()


def test_a_person_accepts_the_loss_and_only_where_somebody_waits(scene: Scene) -> None:
    """The answer names what goes on; without the word nothing is done."""
    leader, one, other = scene.sorted_out()
    status, _ = scene.post(RECOVER + "?accept_loss=true")
    assert status == 412
    scene.client.stopping = True
    leader.kill()
    scene.world.losing()
    for machine in (one, other):
        machine.cut_power(keep=0.0)
        machine.start()
    scene.world.loop.run_for(20.0)
    marked = sorted((one.node, other.node))

    status, planned = scene.post(RECOVER)
    assert (200, marked, [leader.node], []) == (
        status,
        planned["recovering"],
        planned["absent"],
        planned["accepted"],
    )
    scene.world.loop.run_for(20.0)
    assert scene.leader is None

    status, done = scene.post(RECOVER + "?accept_loss=true")
    assert (200, marked) == (status, done["accepted"])
    scene.until(lambda: scene.leader is not None, "a leader")


def test_with_an_accepted_loss_no_log_below_the_latest_that_answers_wins() -> None:
    """Of five, one is gone for good and three have forgotten almost everything: they are a majority, but what
    a person was told that it keeps is with the fourth.
    """
    scene = Scene(nodes=5)
    scene.until(lambda: scene.leader is not None, "a leader")
    gone = scene.leader
    assert gone is not None
    scene.client.stopping = True
    whole, *others = [machine for machine in scene.world.machines.values() if machine is not gone]
    scene.until(
        lambda: len({held.log.last_index for each in scene.world.up if (held := scene.partition(each))}) == 1,
        "copies",
    )
    gone.kill()
    scene.world.losing()
    for machine in (whole, *others):
        machine.cut_power(keep=1.0 if machine is whole else 0.0)
        machine.start()
    scene.world.loop.run_for(20.0)
    assert scene.leader is None

    status, done = scene.post(RECOVER + "?accept_loss=true")
    whole.pause()
    scene.world.loop.run_for(20.0)
    assert (200, whole.node, 4) == (status, done["goes_on_from"], len(done["accepted"]))
    assert done["kept_offset"] > done["committed_offset"]
    assert not any(held.leads for _, held in scene.watch.partitions(TOPIC, 0)), (
        "without what the fourth holds"
    )

    whole.resume()

    def ends() -> list[int]:
        return [held.end_offset for _, held in scene.watch.partitions(TOPIC, 0)]

    scene.until(lambda: len(ends()) == 4 and min(ends()) >= done["kept_offset"], "what was kept, everywhere")
    scene.world.close()


def test_pitfall_35_a_catalog_with_a_damaged_journal_comes_back_marked() -> None:
    """Group 0 follows the same rules: topics and placement survive, and its node goes on under its name."""
    scene = Scene(flush="commit")
    scene.client.stopping = True
    _, one, _ = scene.sorted_out()
    controller = one.controller
    assert controller is not None and controller.group is not None
    log = controller.group.replica.log
    log.recovering = True  # as a recovery that found a hole would have it
    log.set_recovering(recovering=True, incarnation=log.incarnation + 1)
    scene.world.loop.run_for(1.0)
    one.kill()
    one.start()
    scene.until(lambda: one.controller is not None and one.controller.group is not None, "its catalog")
    scene.until(scene.whole, "the end of its mark")
    again = one.controller
    assert again is not None and again.group is not None
    assert not again.group.replica.log.recovering and again.group.replica.log.incarnation == 1
    scene.world.close()


def _forgetful_founder(*, without: tuple[str, ...] = ()) -> tuple[World, Watch, Replica]:
    """A cluster whose founder, cut off, has its first entries of the catalog and no more.

    `without`: documents that are gone besides.
    """
    for seed in range(1, 60):
        world = World(Options(seed=seed, partitions=1, clients=1))
        watch = Watch(world)
        _gather(world)
        world.loop.run_for(1.0)
        founder = world.machines["a"]
        before = founder.controller
        assert before is not None and before.group is not None
        directory = before.group.replica.log.files.directory
        founder.kill()
        for name in founder.disk.list(directory):
            if name.rpartition("-")[0] in without:
                founder.disk.unlink(f"{directory}/{name}")
        others = [node for node in world.machines if node != "a"]
        world.cut([("a", node) for node in others] + [(node, "a") for node in others])
        if founder.disk.exists(FIRST_JOURNAL):  # else a checkpoint has put all of it where it belongs
            founder.disk.rot(FIRST_JOURNAL, (4 + seed % 6) * 4096 + 20, 1)
            founder.start()
            world.loop.run_for(10.0)
            group = founder.controller.group if founder.controller is not None else None
            if group is not None and group.replica.configuration.voters == (1,):
                return world, watch, group.replica
        world.close()
    raise AssertionError("no founder forgets who joined")


@pytest.mark.parametrize("without", [(), ("peers",)])
def test_a_founder_that_forgot_who_joined_leads_no_second_group(without: tuple[str, ...]) -> None:
    """By what is left of its log it is the only voter, and needs nobody's grant. It knows of others
    all the same, waits for their leader, and then has everything again.
    """
    world, watch, replica = _forgetful_founder(without=without)
    core = replica.core
    assert core.recovering
    assert core.role is Role.FOLLOWER and core.deadline_ms() is None

    world.cut([])
    assert world.loop.run_until(
        lambda: not core.recovering and all(each.holds_all() for each in world.machines.values()),
        at_most_s=60.0,
    ), "nobody tells it"
    assert len(replica.configuration.voters) == 3
    world.loop.run_for(10.0)  # until everybody has heard that everybody is alive
    _serve(world, watch)
    assert world.loop.run_until(lambda: watch.converged(TOPIC, 1, 3), at_most_s=60.0)
    world.loop.run_for(2.0)
    assert core.deadline_ms() is not None or core.quiesced, "from here on it stands like any other"
    world.close()


def test_where_the_others_are_is_written_anew_before_its_second_copy_rots() -> None:
    """A founder whose catalog is damaged has nothing else that leads to its peers."""
    world = World(Options(seed=3, partitions=1, clients=1))
    begin(world, Watch(world))
    founder = world.machines["a"]

    def copies() -> list[str]:
        return sorted(path for path, _ in founder.disk.files("data/logs") if "/peers-" in path)

    for which in (0, 1, 0):
        world.loop.run_for(1.0)
        before = copies()
        assert len(before) == 2
        founder.disk.rot(before[which], 30, 1)
        world.loop.run_for(REMEMBER_MS / 1000 + 5.0)
        assert not set(before) & set(copies())
    assert founder.controller is not None and founder.controller.group is not None
    assert set(controller_addresses.read(founder.controller.group.replica.log).addresses) == {"a", "b", "c"}
    world.close()
