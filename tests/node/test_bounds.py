"""What a client can make is bounded, and what bounds it is named; a data folder is its owner's alone."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laminar.http.api.problems import Problem
from laminar.log import RealDisk
from laminar.log.disk.errors import DiskError
from laminar.node.partition import cursor_commands
from laminar.node.partition.state import group_members as rosters
from laminar.node.partition.state.group_members import GroupMembers, Member
from laminar.node.runtime.data_folder import IdentityError, check_owner
from laminar.node.transactions import coordinator
from laminar.node.transactions.coordinator import Coordinator
from tests.node.alone import lone_partition


async def test_cursors_of_a_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are there move on; one that is deleted makes room."""
    monkeypatch.setattr(cursor_commands, "MAX_CURSORS", 2)
    async with lone_partition(tmp_path) as found:

        async def put(name: str, position: int | None) -> None:
            await found.cursor_commands.set(name, position, expected=None, check=False, owner="", now_ms=1)

        await put("a", 0)
        await put("b", 0)
        with pytest.raises(Problem) as refused:
            await put("c", 0)
        assert ("quota", "cursor", 2) == (refused.value.code, refused.value.field, refused.value.limit)
        await put("a", 0)
        await put("b", None)
        await put("c", 0)


def test_members_of_all_groups_of_a_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is known stays; who is gone makes room."""
    monkeypatch.setattr(rosters, "MOST_IN_ALL_GROUPS", 3)
    found = GroupMembers()
    for number in range(3):
        found.renew(f"g{number}", Member("a", "clustering", 2000, 1.0), now_s=1.0)

    with pytest.raises(Problem, match="too many members"):
        found.renew("g0", Member("b", "clustering", 2000, 1.0), now_s=1.0)
    found.renew("g1", Member("a", "clustering", 9000, 2.0), now_s=2.0)
    found.renew("g0", Member("b", "clustering", 2000, 3.0), now_s=3.0)


async def test_sinks_that_are_kept_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is there begins its next epoch; one that writes once is no part of these."""
    monkeypatch.setattr(coordinator, "MAX_KEPT", 2)
    async with lone_partition(tmp_path) as found:
        targets: Any = SimpleNamespace()
        asked = Coordinator(found, targets, spawn=lambda work: work.close())
        for number in range(2):
            await asked.begin(bytes([number]) * 16, f"s{number}", "")
        with pytest.raises(Problem) as refused:
            await asked.begin(b"n" * 16, "new", "")
        assert ("quota", "sink", 2) == (refused.value.code, refused.value.field, refused.value.limit)
        assert 2 == (await asked.begin(bytes(16), "s0", "")).epoch
        assert (await asked.begin(b"o" * 16, "once", "", once=True)).once


def test_a_folder_that_others_may_write_in_is_refused(tmp_path: Path) -> None:
    check_owner(str(tmp_path))
    check_owner(str(tmp_path / "missing"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)

    with pytest.raises(IdentityError, match="every user can write"):
        check_owner(str(tmp_path / "open"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_of_another_owner_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 54_321, -1)

    with pytest.raises(IdentityError, match="belongs to the user 54321"):
        check_owner(str(tmp_path))


def test_a_lock_follows_no_link(tmp_path: Path) -> None:
    """Else whoever may write in the folder chooses which file is made, by whom the node runs as."""
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(DiskError):
        RealDisk().lock(str(tmp_path / "lock"))
    assert not (tmp_path / "elsewhere").exists()
