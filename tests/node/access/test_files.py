"""The secret that a node draws, and the file of the first token."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laminar.node.access.cluster_secret import SecretError, with_secret
from laminar.node.access.first_token import FILE, FirstToken
from laminar.node.access.private_files import read_private, write_private
from laminar.node.access.tokens import id_of, proves
from laminar.node.host.settings import OPEN, Settings, SettingsError
from laminar.node.host.settings_sources import load
from membership import credential_rules as rules
from membership.catalog import NotCatalogLeader
from membership.records import CatalogState
from membership.requests import ChangeAccess, CreateCredential, Result, RevokeCredential


def mode(path: Path) -> int:
    """Permissions of a file."""
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_file_is_replaced_whole_and_follows_no_link(tmp_path: Path) -> None:
    """Readable by its user alone, whatever the umask."""
    path = tmp_path / "f"
    before = os.umask(0)
    try:
        write_private(str(path), "one")
        write_private(str(path), "two")
    finally:
        os.umask(before)
    assert (0o600, "two", ["f"]) == (mode(path), read_private(str(path)), os.listdir(tmp_path))
    assert "" == read_private(str(tmp_path / "none"))
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        read_private(str(tmp_path / "link"))


def test_the_first_node_draws_the_secret_once(tmp_path: Path) -> None:
    """Later starts have the same, also one that is open: the other nodes still need it."""
    first = with_secret(Settings(), str(tmp_path), joins=False).secret

    assert len(first) >= 43 and 0o600 == mode(tmp_path / "secret")
    assert first == with_secret(Settings(), str(tmp_path), joins=True).secret
    assert first == with_secret(Settings(access=OPEN), str(tmp_path), joins=False).secret
    assert "s" * 16 == with_secret(Settings(secret="s" * 16), str(tmp_path), joins=False).secret


def test_no_secret_is_drawn_where_none_is_needed_or_others_would_not_know_it(tmp_path: Path) -> None:
    """An open node has none; a node of a cluster is told where to find it."""
    assert "" == with_secret(Settings(access=OPEN), str(tmp_path), joins=False).secret
    with pytest.raises(SecretError, match="secret_file"):
        with_secret(Settings(), str(tmp_path), joins=True)
    assert [] == os.listdir(tmp_path)


def test_a_secret_is_read_from_a_file(tmp_path: Path) -> None:
    """Without its line's end; what is no secret is refused with the file's name."""
    file = tmp_path / "secret"
    file.write_text("of sixteen letters or more\n")
    environ = {"LAMINAR_SECRET_FILE": str(file)}
    assert "of sixteen letters or more" == load(environ=environ).settings.secret
    with pytest.raises(SettingsError, match="either secret or secret_file"):
        load(environ=environ | {"LAMINAR_SECRET": "s" * 16})
    for text, said in (("", "is empty"), ("short", "16 characters")):
        file.write_text(text)
        with pytest.raises(SettingsError, match=said):
            load(environ=environ)
    file.unlink()
    with pytest.raises(SettingsError, match="can't be read"):
        load(environ=environ)


class Tables:
    """A catalog that one node leads, as far as the first token needs it."""

    def __init__(self, *, before: Callable[[], None] = lambda: None) -> None:
        """Call `before` before each command is carried out."""
        self.code_version = 6
        self.kept = CatalogState()
        self._before = before

    def state(self) -> CatalogState:
        """See `Catalog`."""
        return self.kept

    async def change_access(self, step: CreateCredential | RevokeCredential) -> Result:
        """See `Catalog`."""
        self._before()
        self.kept, result = rules.change_access(self.kept, ChangeAccess(step))
        return result


def first_token(folder: Path) -> FirstToken:
    """The first token in a data folder."""
    folder.mkdir(exist_ok=True)
    return FirstToken(str(folder), now_ms=lambda: 7)


async def test_the_first_token_is_on_disk_before_the_catalog_has_it(tmp_path: Path) -> None:
    """A credential whose token no one has would lock the operator out."""
    seen: list[str] = []
    tables: Any = Tables(before=lambda: seen.append(read_private(str(tmp_path / FILE))))
    mine = first_token(tmp_path)
    await mine.make_if_none(tables)
    await mine.make_if_none(tables)

    (text,) = seen
    (record,) = tables.kept.credentials.values()
    assert proves(text, record) and 0o600 == mode(tmp_path / FILE)
    assert ("admin", "admin", "") == (record.name, record.grants[0].role, record.grants[0].prefix)
    await mine.tidy(tables)
    await first_token(tmp_path).tidy(tables)  # after a restart
    assert text == read_private(str(tmp_path / FILE))


async def test_no_token_is_made_before_all_nodes_know_credentials(tmp_path: Path) -> None:
    """And no file is left that would name one."""
    tables: Any = Tables()
    tables.code_version = 5
    await first_token(tmp_path).make_if_none(tables)

    assert (0, []) == (len(tables.kept.credentials), os.listdir(tmp_path))


async def test_of_two_leaders_one_makes_it_and_the_other_removes_its_file(tmp_path: Path) -> None:
    """The second has led for a moment, and has written its file already."""
    tables: Any = Tables()
    first, second = first_token(tmp_path / "a"), first_token(tmp_path / "b")
    begun: Any = SimpleNamespace(code_version=6, state=CatalogState, change_access=tables.change_access)
    await first.make_if_none(tables)
    await second.make_if_none(begun)
    assert os.listdir(tmp_path / "b") == [FILE]
    await first.tidy(tables)
    await second.tidy(tables)

    (record,) = tables.kept.credentials.values()
    assert record.id == id_of(read_private(str(tmp_path / "a" / FILE)))
    assert [] == os.listdir(tmp_path / "b")


async def test_a_file_that_a_crash_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """It was written, and its node lost the lead before the catalog had it."""

    def lost() -> None:
        raise NotCatalogLeader("other")

    with pytest.raises(NotCatalogLeader):
        await first_token(tmp_path / "a").make_if_none(Tables(before=lost))  # type: ignore[arg-type]
    assert [FILE] == os.listdir(tmp_path / "a")
    tables: Any = Tables()
    await first_token(tmp_path / "b").make_if_none(tables)

    await first_token(tmp_path / "a").tidy(tables)

    assert [] == os.listdir(tmp_path / "a")
