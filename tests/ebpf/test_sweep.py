"""What lies in the shared folder and is none of Laminar's: it stays, and hinders no node."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebpf import shared


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ordinary folder in place of the one in the bpf file system: names and locks work alike."""
    monkeypatch.setattr(shared, "FOLDER", tmp_path / "laminar")
    shared.FOLDER.mkdir()
    return shared.FOLDER


def test_a_sweep_removes_what_dead_nodes_left_and_nothing_of_others(folder: Path) -> None:
    """A file beside the programs, one that has a program's name, and a folder of somebody's own."""
    (folder / "pinned-by-hand").write_bytes(b"")
    (folder / "1-2-00ff").write_bytes(b"")
    (folder / "backup" / "deep").mkdir(parents=True)
    dead = folder / "4026531840-1-0123456789ab"
    (dead / "node-0-999999").mkdir(parents=True)
    (dead / "targets").write_bytes(b"")

    shared.sweep()

    assert {"pinned-by-hand", "1-2-00ff", "backup"} == {path.name for path in folder.iterdir()}
    assert (folder / "backup" / "deep").is_dir()


def test_what_a_node_has_just_removed_has_no_nodes_and_none_alive(folder: Path) -> None:
    """Who only looks, as `laminar steer status`, holds no lock that would keep the others from leaving."""
    program = folder / "4026531840-1-0123456789ab"

    assert [] == shared.nodes_in(program)
    assert not shared.is_alive(program / "node-0-1")


def test_a_file_with_a_nodes_name_is_no_node(folder: Path) -> None:
    """It can have no lock that shows that its node is alive."""
    program = folder / "4026531840-1-0123456789ab"
    (program / "node-0-1").mkdir(parents=True)
    (program / "node-1-2").write_bytes(b"")

    assert [(0, 1, program / "node-0-1")] == shared.nodes_in(program)
