"""The catalog goes on with one copy: the folder of a stopped node, and handshakes between epochs."""

from __future__ import annotations

import pytest

from laminar.batch import Header, Kind
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.recovery.node import controller_store, logs_directory
from laminar.log.storage import Storage
from laminar.node.catalog.recovery import Refused, StoppedNode
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.consensus.replica import TERMS_PASSED, initial_frame
from laminar.node.runtime.data_folder import IdentityError, open_data_folder
from laminar.node.secret.keys import Keys
from laminar.node.transport.handshake import (
    Acceptor,
    Channel,
    HandshakeError,
    Hello,
    Initiator,
    decode_hello,
)
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import SMALL

THREE = ConfigurationRecord(voters=((1, "a"), (2, "b"), (3, "c")))


def home_of(disk: FaultDisk) -> Storage:
    """What the controller has."""
    return Storage.open(disk, controller_store("data"), logs_directory("data"), settings=SMALL)


async def a_member(voters: ConfigurationRecord = THREE) -> FaultDisk:
    """The folder of node `a`, stopped, with its copy of the catalog."""
    disk = FaultDisk()
    folder = open_data_folder(disk, "data", node="a", joining=False)
    folder.record_cluster(folder.identity.cluster_id)
    folder.close()
    storage = home_of(disk)
    log = storage.create_log("catalog")
    log.append([initial_frame(voters, created_ms=1)])
    storage.record_hard_state(1, term=7, vote=2)
    await storage.sync()
    entry = ReplicaEntry(
        log_id=log.log_id,
        replica_id=1,
        incarnation=1,
        group=folder.identity.cluster_id,
        topic="",
        partition=0,
        partition_hash=0,
        state="made",
        created_ms=1,
        voters=list(voters.voters),
        settings={},
    )
    await storage.write_manifest([entry])
    await storage.close()
    return disk


async def test_the_copy_gets_a_configuration_of_its_own_and_the_folder_a_new_epoch() -> None:
    """In a term that the lost voters do not reach; each recovery is another epoch."""
    disk = await a_member()
    node = StoppedNode(disk, "data")
    before = await node.describe()
    assert (["a", "b", "c"], 1, "") == (before.voters, before.last_index, before.epoch)
    with pytest.raises(IdentityError, match="in use"):
        StoppedNode(disk, "data")
    epoch = await node.recover()
    after = await node.describe()
    with pytest.raises(Refused, match="only voter"):
        await node.recover()
    node.close()

    assert (["a"], 2, epoch.hex()) == (after.voters, after.last_index, after.epoch)
    assert after.last_term == 7 + TERMS_PASSED
    storage = home_of(disk)
    [log] = storage.logs.values()
    assert Header.unpack(log.read_nowait(2, 2, max_bytes=1)[0]).kind == Kind.CONFIGURATION  # type: ignore[index]
    assert storage.hard_states[1].term == after.last_term and storage.hard_states[1].vote == 1
    await storage.close()


async def test_another_folder_that_survived_is_taken_into_the_epoch_and_keeps_its_copy() -> None:
    """Not back into an earlier one."""
    node = StoppedNode(await a_member(), "data")
    epoch = (1).to_bytes(8) + b"x" * 8
    node.take_into(epoch)
    assert (epoch.hex(), 1) == ((await node.describe()).epoch, (await node.describe()).last_index)
    with pytest.raises(Refused, match="already"):
        node.take_into(epoch)
    node.close()


def hello(epoch: bytes, *, cluster: bytes = b"c" * 16) -> Hello:
    return Hello(1, cluster, "n", 0, b"n" * 16, Channel.CONTROL, b"x" * 32, b"", epoch)


def greet(mine: Hello, theirs: Hello, *, secret: bytes = b"secret" * 4) -> None:
    """Both sides of a handshake, as far as it comes."""
    initiator, acceptor = Initiator(mine, [Keys(secret)]), Acceptor(theirs, [Keys(b"secret" * 4)])
    proof, _ = initiator.take_reply(acceptor.take_hello(decode_hello(initiator.hello), sent=initiator.hello))
    acceptor.take_proof(proof)


def test_nodes_of_different_epochs_do_not_talk_and_the_older_one_learns_that_it_is() -> None:
    """Only from one that has shown the secret: who believes it ends."""
    first, second, other = (
        number.to_bytes(8) + fill * 8 for number, fill in ((1, b"a"), (2, b"b"), (1, b"c"))
    )
    greet(hello(first), hello(first))
    greet(hello(b""), hello(b""))
    with pytest.raises(HandshakeError, match="without this node") as caught:
        greet(hello(b""), hello(first))
    assert caught.value.outdated
    with pytest.raises(HandshakeError, match="without this node") as caught:
        greet(hello(first), hello(second))
    assert caught.value.outdated
    for mine, theirs in ((second, first), (first, other)):
        with pytest.raises(HandshakeError, match="without it") as caught:
            greet(hello(mine), hello(theirs))
        assert not caught.value.outdated
    with pytest.raises(HandshakeError, match="secret") as caught:
        greet(hello(b""), hello(first), secret=b"another one" * 2)
    assert not caught.value.outdated
