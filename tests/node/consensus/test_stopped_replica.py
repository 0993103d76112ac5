"""A mistake in one group stops that replica; the process and all its other groups go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laminar.batch import Header, build
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import ReplicaStopped
from laminar.node.consensus.raft_frames import control_frame
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.consensus.replica import initial_frame
from laminar.node.partition.state.state import PartitionState
from laminar.node.transport.transport import Channel, Peer, ProtocolError
from raft.messages import AnyMessage, HeartbeatAnswer
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import open_inline
from tests.node.alone import add_partition, lone_partition
from tests.node.opened import entry, open_all
from tests.node.trio import CLUSTER, GROUP, VOTERS, Member, batch, send, trio


def broken(*_: object, **__: object) -> Any:
    raise AssertionError("a mistake")


@pytest.mark.parametrize("where", ["propose", "persisted", "committed", "expire", "unquiesce", "deadline_ms"])
async def test_a_mistake_in_one_group_leaves_the_others_of_the_process_as_they_were(
    tmp_path: Path, where: str
) -> None:
    """Whatever raises it, a request, the disk, the clock or news: one replica stops, its waiters are told."""
    stopped: list[str] = []
    async with lone_partition(tmp_path, stopped=stopped) as well:
        driver = well.context.driver
        poisoned = await add_partition(
            driver, driver._storage, 1, voters=ConfigurationRecord(voters=((2, "here"),))
        )
        await poisoned.appends.append_frame(bytearray(build([b"before"])), _header(build([b"before"])))
        if where == "committed":
            poisoned.state.committed = broken  # type: ignore[method-assign]
        else:
            setattr(poisoned.replica.core, where, broken)
        if where == "expire":
            driver._timekeeper._due(poisoned.replica, 10**12)
        elif where == "deadline_ms":
            driver._timekeeper._expire_due(10**12)
        elif where == "unquiesce":
            driver.unreachable(poisoned.replica, 1)
        else:
            with pytest.raises(Problem) as problem:
                await poisoned.appends.append_frame(bytearray(build([b"x"])), _header(build([b"x"])))
            assert "outcome_unknown" == problem.value.code

        assert ["t/1"] == stopped
        assert isinstance(poisoned.replica.failure, ReplicaStopped)
        with pytest.raises(Problem):
            await poisoned.appends.append_frame(bytearray(build([b"y"])), _header(build([b"y"])))
        receipt = await well.appends.append_frame(bytearray(build([b"z"])), _header(build([b"z"])))
        assert 0 == receipt.offset
        assert 1 == driver.statistics()["stopped_replicas"]


def _header(frame: bytearray) -> Any:
    return Header.unpack(frame)


async def test_a_message_that_cannot_be_encoded_is_dropped_and_stops_its_replica() -> None:
    """It ended the process, in the turn's end that all groups share."""
    async with trio() as cluster:
        leader = await cluster.leader()
        await send(leader, batch(0, b"x"))
        await cluster.settled()
        replica = leader.replica
        receiver = next(member for member in replica.configuration.voters if member != replica.replica_id)
        leader.driver._outbox.control(
            replica, HeartbeatAnswer(CLUSTER, GROUP, replica.replica_id, receiver, 1, 1 << 70, 0)
        )
        leader.driver._outbox.flush()

        assert [OverflowError] == [type(error) for error in leader.stopped]
        assert [] == leader.failures
        leader.stopped.clear()
        await cluster.leader(among=[node for node in cluster.members if node != leader.node])


async def test_what_a_stopped_replica_had_gathered_in_its_turn_does_not_leave() -> None:
    """A core that raised may have decided wrongly just before; what was told to nobody stays untold."""
    async with trio() as cluster:
        leader = await cluster.leader()
        await send(leader, batch(0, b"x"))
        await cluster.settled()
        left: list[object] = []

        def listening(
            sender: Member, receiver: Member, channel: Channel, messages: list[AnyMessage]
        ) -> float:
            left.extend(messages if sender is leader else [])
            return 0

        cluster.wire = listening
        send(leader, batch(1, b"y"))
        leader.driver.stop_replica(leader.replica, AssertionError("a mistake"))
        leader.driver._outbox.flush()
        leader.stopped.clear()
        await cluster.leader(among=[node for node in cluster.members if node != leader.node])

        assert [] == left


@pytest.mark.parametrize("frame", [b"", b"\xff" * 40, b"\x01\x05\x00\x00\x00\x91\xc0\xc0\xc0\xc0"])
async def test_a_frame_that_nobody_can_read_costs_nobody_anything(frame: bytes) -> None:
    """Dropped and counted; no replica stops."""
    async with trio() as cluster:
        leader = await cluster.leader()
        peer = Peer("b", 1, b"n" * 16)
        with pytest.raises(ProtocolError):  # ends the connection
            leader.driver.on_frame(peer, Channel.CONTROL, memoryview(frame))
        head, body = control_frame([HeartbeatAnswer(CLUSTER, GROUP, 2, 1, 1, 1, 0)])
        with pytest.raises(ProtocolError):
            leader.driver.on_frame(
                peer, Channel.CONTROL, memoryview(bytes(head) + bytes(body[:-1]) + b"\xc1")
            )

        assert 2 == leader.driver.bad_frames
        assert [] == leader.failures and [] == leader.stopped


async def test_a_replica_that_cannot_be_made_from_its_log_stays_away_alone_and_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Told as lost, another would take its place and its data would go, on all nodes, by one mistake."""
    storage = open_inline(FaultDisk())
    entries = []
    for number in (1, 2):
        log = storage.create_log(f"t-{number}")
        log.append([initial_frame(VOTERS, created_ms=1)])
        storage.record_hard_state(number, term=1, vote=0)
        entries.append(entry(number, log.log_id))
    await storage.sync()
    poisoned = storage.logs[entries[0].log_id].start
    appended = PartitionState.appended

    def one_fails(tables: PartitionState, header: Any, frame: Any) -> None:
        if tables is made[0]:
            broken()
        appended(tables, header, frame)

    made: list[PartitionState] = []
    begin = PartitionState.__init__

    def noted(tables: PartitionState, *args: Any, **named: Any) -> None:
        made.append(tables)
        begin(tables, *args, **named)

    monkeypatch.setattr(PartitionState, "__init__", noted)
    monkeypatch.setattr(PartitionState, "appended", one_fails)
    shard = await open_all(storage, entries)

    assert [2] == [replica.replica_id for replica in shard.driven]
    assert [] == shard.lost and "a mistake" in shard.failed[1][1]
    assert storage.logs[entries[0].log_id].start == poisoned, "its log stays as it is"
    await storage.close()
