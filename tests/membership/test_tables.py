"""The catalog's tables: what a dict would say, at the cost of what changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from typing import ClassVar

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from membership.records import CatalogState
from membership.tables import PARTS, Indexed, Table, encoded, part_of
from tests.membership.nodes import node

_keys = st.integers(0, 60).map("t-{}/0".format)
_steps = st.lists(st.dictionaries(_keys, st.none() | st.integers(0, 9)), max_size=12)


class Numbers(Indexed[tuple[int, int]]):
    KEYS: ClassVar = {"first": lambda record: (record[0],), "both": lambda record: record}
    __slots__ = ()


def applied(records: dict[str, int], changes: dict[str, int | None]) -> dict[str, int]:
    merged = records | changes
    return {key: record for key, record in merged.items() if record is not None}


@given(steps=_steps)
def test_a_table_says_what_a_dict_would_and_former_tables_stay(steps: list[dict[str, int | None]]) -> None:
    known: list[tuple[Table[str, int], dict[str, int]]] = [(Table(), {})]
    for changes in steps:
        table, records = known[-1]
        known.append((table.changed(changes), applied(records, changes)))
    for table, records in known:
        assert table == records and len(table) == len(records)
        assert sorted(table) == sorted(records) and sorted(table.items()) == sorted(records.items())
        assert sorted(table.values()) == sorted(records.values())
        assert all(table[key] == table.get(key) == record and key in table for key, record in records.items())
        assert "absent" not in table and table.get("absent", 5) == 5
        assert msgspec.msgpack.decode(encoded({"a": [table]})) == {"a": [records]}


@given(steps=_steps)
def test_what_changed_since_any_former_table_is_found_and_leads_from_it(
    steps: list[dict[str, int | None]],
) -> None:
    tables: list[Table[str, int]] = [Table()]
    for changes in steps:
        tables.append(tables[-1].changed(changes))
    for before in tables:
        changes = tables[-1].changes_since(before)
        assert before.changed(changes) == tables[-1]
        assert all(before.get(key) is not record for key, record in changes.items())


def test_a_change_copies_one_part_and_none_where_nothing_changes() -> None:
    table = Table({f"t-{number}/0": number for number in range(5000)})
    after = table.changed({"t-17/0": -1})
    shared = sum(one is other for one, other in zip(table._parts, after._parts, strict=True))
    assert shared == PARTS - 1
    assert table.changed({"absent": None, "t-17/0": 17}) is table


def test_the_parts_have_nearly_as_many_keys_each() -> None:
    table = Table({f"topic-{number:06d}/0": number for number in range(20 * PARTS)})
    assert max(map(len, table._parts)) < 60


@given(
    steps=st.lists(
        st.dictionaries(_keys, st.none() | st.integers(0, 40).map(lambda number: (number, -1 - number))),
        max_size=8,
    )
)
def test_an_index_follows_each_change(steps: list[dict[str, tuple[int, int] | None]]) -> None:
    """Asked once at the start, then kept up; a table that was made whole answers alike."""
    table = Numbers()
    assert table.find("first", 1) is None
    for changes in steps:
        free = {
            key: record for key, record in changes.items() if record is None or _is_free(table, changes, key)
        }
        table = table.changed(free)
        whole = Numbers(table.plain())
        for number in range(41):
            assert table.find("first", number) == whole.find("first", number)
            assert table.find("both", -1 - number) == whole.find("first", number)


def _is_free(table: Numbers, changes: Iterable[str], key: str) -> bool:
    """No other record has, or gets, the same keys: each belongs to one record at most."""
    record = changes[key]  # type: ignore[index]
    others = [other for name, other in {**table, **changes}.items() if name != key]  # type: ignore[dict-item]
    return record not in others and record not in [other for name, other in table.items() if name != key]


def test_the_order_of_a_table_is_the_same_in_every_process() -> None:
    """The hashes of texts differ from process to process."""
    program = "from membership.tables import Table; print(list(Table({f't-{n}/0': n for n in range(99)})))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert len(printed) == 1
    assert part_of("t-1/0") == part_of(b"t-1/0")


def test_a_state_is_encoded_as_one_of_dicts_is() -> None:
    """Snapshots, views and joins are read by nodes that have dicts there, and written by them."""

    class Dicts(msgspec.Struct):
        cluster_id: bytes = b""
        version: int = 0
        nodes: dict[str, object] = {}
        topics: dict[str, object] = {}
        partitions: dict[str, object] = {}
        next_replica_id: int = 1
        tombstones: dict[str, object] = {}
        removed_stores: list[bytes] = []
        credentials: dict[str, object] = {}
        limits: dict[str, object] = {}

    plain = Dicts(b"c" * 16, 7, {"a": node("a")})
    state = CatalogState(b"c" * 16, 7, {"a": node("a")})
    assert encoded(state) == msgspec.msgpack.encode(plain)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=CatalogState) == state
