"""What a controller remembers of the other nodes' folders, beside a catalog that may be old."""

from __future__ import annotations

from msgspec.structs import replace

from laminar.node.catalog.controller_addresses import AddressBook, KnownFolder
from membership.boot_history import BootRecord
from membership.records import CatalogState
from tests.membership.nodes import node

OLDER, NEWER = BootRecord(1, b"1"), BootRecord(2, b"2")


def state_with(store: bytes, boot: BootRecord, *, removed: tuple[bytes, ...] = ()) -> CatalogState:
    record = replace(node("b"), store_id=store, boot=boot)
    return CatalogState(version=9, nodes={"b": record}, removed_stores=list(removed))


def test_of_one_folder_the_newest_start_counts_wherever_it_is_known() -> None:
    book = AddressBook()
    book.folders["b"] = KnownFolder(b"s", NEWER)
    assert book.folder("b", state_with(b"s", OLDER)) == KnownFolder(b"s", NEWER)
    book.folders["b"] = KnownFolder(b"s", OLDER)
    assert book.folder("b", state_with(b"s", NEWER)) == KnownFolder(b"s", NEWER)
    assert AddressBook().folder("b", CatalogState()) is None


def test_a_folder_of_a_removed_node_does_not_count_against_the_next_of_its_name() -> None:
    book = AddressBook()
    book.folders["b"] = KnownFolder(b"old", NEWER)
    known = book.folder("b", state_with(b"new", OLDER, removed=(b"old",)))
    assert known == KnownFolder(b"new", OLDER)
    assert book.folder("b", CatalogState(removed_stores=[b"old"])) is None


def test_a_copy_of_the_catalog_from_before_the_removal_does_not_bring_the_former_folder_back() -> None:
    """After a restart the catalog passes through old states."""
    book = AddressBook()
    book.folders["b"] = KnownFolder(b"new", OLDER)
    assert book.folder("b", state_with(b"old", NEWER)) == KnownFolder(b"new", OLDER)
