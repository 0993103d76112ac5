"""The data folder: formatted once, locked, and refused when it isn't what the node was told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from laminar.log.disk.disk import RealDisk
from laminar.log.disk.document import Document
from laminar.log.disk.errors import DamagedDocument
from laminar.node.runtime import data_folder as module
from laminar.node.runtime.data_folder import (
    DataFolder,
    IdentityError,
    open_data_folder,
    open_stopped,
)
from laminar.node.runtime.listeners import Ports
from membership.boot_history import advance
from membership.catalog import CODE_VERSION
from tests.disks.fault_disk import FaultDisk

PORTS = Ports(shared=1, own=(2, 3), peers=(4, 5, 6), gossip=7)


def open_folder(path: Path, *, node: str = "", joining: bool = False) -> DataFolder:
    """On the real disk."""
    return open_data_folder(RealDisk(), str(path), node=node, joining=joining)


def test_an_empty_folder_becomes_a_new_store_of_a_new_cluster(tmp_path: Path) -> None:
    """Only a start without a cluster to join makes a cluster id."""
    folder = open_folder(tmp_path / "a" / "b", node="n1")
    folder.close()

    assert (
        folder.identity.node,
        len(folder.identity.store_id),
        len(folder.identity.cluster_id),
        folder.identity.founding,
    ) == ("n1", 16, 16, True)


def test_a_folder_is_the_same_store_at_the_next_start(tmp_path: Path) -> None:
    """Identity, drawn name included, is kept."""
    first = open_folder(tmp_path)
    first.close()
    second = open_folder(tmp_path)
    second.close()

    assert first.identity == replace(second.identity, boot_history=first.identity.boot_history)
    assert first.identity.node.startswith("node-")


def test_a_joining_node_has_no_cluster_until_it_is_told(tmp_path: Path) -> None:
    """And it keeps what it was told, durably, and for ever."""
    folder = open_folder(tmp_path, node="n2", joining=True)
    assert (folder.identity.cluster_id, folder.identity.founding) == (b"", False)

    folder.record_cluster(b"c" * 16)
    folder.record_cluster(b"c" * 16)
    with pytest.raises(IdentityError, match="belongs to cluster 6363"):
        folder.record_cluster(b"d" * 16)
    folder.close()

    again = open_folder(tmp_path)
    again.close()
    assert again.identity.cluster_id == b"c" * 16


def test_a_founding_node_ends_founding_when_the_cluster_is_made(tmp_path: Path) -> None:
    """Before that it may begin again; after it, never: an empty catalog is then a lost one."""
    folder = open_folder(tmp_path)

    folder.record_cluster(folder.identity.cluster_id)

    assert not folder.read_identity().founding
    folder.close()


def test_a_join_that_did_not_finish_must_be_said_again(tmp_path: Path) -> None:
    """Without --join the node would make a cluster of its own out of a half-joined folder."""
    open_folder(tmp_path, joining=True).close()

    with pytest.raises(IdentityError, match="--join"):
        open_folder(tmp_path)
    open_folder(tmp_path, joining=True).close()


def test_another_nodes_folder_is_refused(tmp_path: Path) -> None:
    """Two names must not share a store."""
    open_folder(tmp_path, node="n1").close()

    with pytest.raises(IdentityError, match="folder of node 'n1', not of 'n2'"):
        open_folder(tmp_path, node="n2")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    """An old version must not write into what it doesn't understand."""
    newer = {"format_version": CODE_VERSION + 1, "store_id": 7}  # the rest as no program of today has it
    Document(RealDisk(), str(tmp_path), "identity").write(msgspec.msgpack.encode(newer))
    (tmp_path / "lock").touch()
    before = contents(tmp_path)

    said = f"file identity has format version {CODE_VERSION + 1}, and this program knows .* {CODE_VERSION}:"
    for start in (open_folder, lambda folder: open_stopped(RealDisk(), str(folder))):
        with pytest.raises(IdentityError, match=said):
            start(tmp_path)
    assert before == contents(tmp_path)


def test_a_folder_of_a_newer_program_is_used_until_something_newer_is_enabled(tmp_path: Path) -> None:
    """Else nobody could go back to the older program; and from then on, nobody may."""
    folder = open_folder(tmp_path)
    assert folder.identity.format_version == 1
    folder.record_format_version(CODE_VERSION)
    folder.record_format_version(1)
    folder.close()

    again = open_folder(tmp_path)
    assert again.identity.format_version == CODE_VERSION
    again.close()


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file's name and bytes."""
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def test_data_without_an_identity_is_refused(tmp_path: Path) -> None:
    """An emptied or foreign folder is never silently a member."""
    (tmp_path / "shards").mkdir()

    with pytest.raises(IdentityError, match="no identity"):
        open_folder(tmp_path)


def test_a_damaged_identity_is_not_replaced_by_a_new_one(tmp_path: Path) -> None:
    """One whole copy is enough; without any the start fails."""
    first = open_folder(tmp_path)
    first.close()
    one, _ = sorted(tmp_path.glob("identity-*"))

    one.write_bytes(one.read_bytes()[:-1])
    again = open_folder(tmp_path)
    again.close()
    assert first.identity == replace(again.identity, boot_history=first.identity.boot_history)

    for copy in tmp_path.glob("identity-*"):
        copy.write_bytes(b"")
    with pytest.raises(DamagedDocument):
        open_folder(tmp_path)


def test_a_folder_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on one journal would destroy it."""
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.05)
    folder = open_folder(tmp_path)

    with pytest.raises(IdentityError, match="in use by another Laminar process"):
        open_folder(tmp_path)
    folder.close()
    open_folder(tmp_path).close()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    """Nothing has to be cleaned up by hand after kill -9."""
    program = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[2])\n"
        "from laminar.log.disk.disk import RealDisk\n"
        "from laminar.node.runtime.data_folder import open_data_folder\n"
        "folder = open_data_folder(RealDisk(), sys.argv[1], node='', joining=False)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(__file__).resolve().parents[3])
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path), root], check=False).returncode == -9

    open_folder(tmp_path).close()


def test_ports_are_kept(tmp_path: Path) -> None:
    """For --port 0."""
    folder = open_folder(tmp_path)
    assert folder.read_ports() is None

    folder.write_ports(PORTS)

    assert folder.read_ports() == PORTS
    folder.close()


def test_node_json_is_replaced_whole(tmp_path: Path) -> None:
    """Also over what a crash left half-written."""
    folder = open_folder(tmp_path)
    (tmp_path / "node.json.new").write_text("{half")

    folder.write_node_file({"url": "http://a:1"})
    folder.write_node_file({"url": "http://a:2"})

    assert json.loads((tmp_path / "node.json").read_text()) == {"url": "http://a:2"}
    assert not (tmp_path / "node.json.new").exists()
    folder.remove_node_file()
    assert not (tmp_path / "node.json").exists()
    folder.close()


def test_each_opening_begins_a_life_before_anything_else(tmp_path: Path) -> None:
    """Numbers without a gap, another nonce each time; what the catalog knows is not carried along."""
    seen = []
    for _ in range(3):
        folder = open_folder(tmp_path)
        seen.append(folder.read_identity().boot_history)
        folder.close()

    assert [[life.number for life in lives] for lives in seen] == [[1], [1, 2], [1, 2, 3]]
    assert len({life.nonce for life in seen[-1]}) == 3
    folder = open_folder(tmp_path)
    folder.record_boot_history(folder.identity.boot_history[-1:])
    folder.close()
    folder = open_folder(tmp_path)
    assert [life.number for life in folder.identity.boot_history] == [4, 5]
    folder.close()


def test_company_is_never_forgotten(tmp_path: Path) -> None:
    """By no other change of the identity."""
    folder = open_folder(tmp_path)
    folder.record_has_peers()
    folder.record_boot_history(advance(folder.identity.boot_history))
    folder.record_cluster(folder.identity.cluster_id)
    folder.close()
    folder = open_folder(tmp_path)

    assert folder.identity.has_peers
    assert [life.tick for life in folder.identity.boot_history] == [1, 0]
    folder.close()


def test_a_full_disk_keeps_no_node_from_starting() -> None:
    """It goes on as the life before: nothing new can be promised there that a copy would lack."""
    disk = FaultDisk()
    folder = open_data_folder(disk, "data", node="a", joining=False)
    lives = folder.identity.boot_history
    folder.close()
    disk.room_bytes = 0
    folder = open_data_folder(disk, "data", node="a", joining=False)

    assert folder.identity.boot_history == lives
    folder.close()
