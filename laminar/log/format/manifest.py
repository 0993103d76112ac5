"""The manifest: the list of a shard's replicas, by which a missing replica is known as *lost*, not as new.

This module only stores the list; `laminar.node` decides what follows from it. The manifest is separate from
the checkpoint because it changes rarely, and must be readable even if the journal is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from laminar.log.disk.disk import Disk
from laminar.log.disk.document import Document


class ReplicaEntry(msgspec.Struct, kw_only=True):
    """One replica of one partition, in the manifest.

    `voters` are (replica id, node id) of the group at the replica's creation; replica ids are never reused.
    `state` is "making" until the replica is complete, then "made"; `laminar.node` sets it, and has a third
    state for replicas that move.
    """

    log_id: int
    replica_id: int
    group: bytes
    topic: str
    partition: int
    partition_hash: int
    state: str = "making"
    incarnation: int = 0
    created_ms: int = 0
    voters: list[tuple[int, str]] = []
    settings: dict[str, int | str] = {}


class Unknown(msgspec.Struct, kw_only=True):
    """The content of a manifest that may lack replicas, written because the manifest before was lost.

    It is replaced when the catalog has said which replicas there are. `set_aside` is set when the start that
    found the loss has ended, so that the old content of the store directory is preserved and not used any
    more. While it is False, each start preserves a copy of that content again and begins without it
    (`laminar.log.recovery.store`).
    """

    entries: list[ReplicaEntry]
    set_aside: bool = True


ManifestChange = Mapping[int, ReplicaEntry | None]
"""By the key of an entry (`Manifest.by_key`), what it becomes; None for one that goes."""

_Content = list[ReplicaEntry] | Unknown
_encoder = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[_Content] = msgspec.msgpack.Decoder(_Content)


def decode_manifest(payload: bytes) -> _Content:
    """Return the entries of an encoded manifest, or an `Unknown` that holds them."""
    return _DECODER.decode(payload)


class Manifest:
    """The durable list of a store directory's replicas, in memory and in its document.

    One thread changes it. Other threads may read the tables in memory at the same time, if they look up one
    entry at a time, or copy the whole table by one call. `known` is set if `entries` has every replica that
    was created here and not removed since; if it is False, no replica may be created
    (docs/consensus.md#births-and-removals). `set_aside` is explained at `Unknown`. `written` is set if the
    document exists.
    """

    def __init__(self, disk: Disk, directory: str) -> None:
        self._document = Document(disk, directory, "manifest")
        self._by_key: dict[int, ReplicaEntry] = {}
        # The same, encoded: of 10,000 entries a change then encodes one, and copies the others.
        self._encoded: dict[int, bytes] = {}
        self._by_group: dict[bytes, ReplicaEntry] = {}
        self._unmade: dict[int, ReplicaEntry] = {}
        self.known = True
        self.set_aside = True
        self.written = False

    @property
    def entries(self) -> list[ReplicaEntry]:
        """All entries, the oldest first."""
        return list(self._by_key.values())

    @property
    def by_key(self) -> Mapping[int, ReplicaEntry]:
        """The entries by replica id; in a folder of logs, which has no replica ids, by minus the log id."""
        return self._by_key

    @property
    def unmade(self) -> list[ReplicaEntry]:
        """The entries whose state is not "made": replicas that are not complete, or that move."""
        return list(self._unmade.values())

    def of_group(self, group: bytes) -> ReplicaEntry | None:
        """Return the entry of the replica of a Raft group, by the group's id; None if there is none here."""
        return self._by_group.get(group)

    def load(self) -> None:
        """Read the entries, and write them again, because they may have been in the page cache only."""
        payload = self.read()
        if payload is not None:
            self._document.write(payload)

    def read(self) -> bytes | None:
        """Read the entries without changing the document; return its payload, None if there is none."""
        payload = self._document.read()
        self.written = payload is not None
        if payload is not None:
            found = decode_manifest(payload)
            if isinstance(found, Unknown):
                self._take(found.entries)
                self.known, self.set_aside = False, found.set_aside
            else:
                self._take(found)
        return payload

    def replace(
        self, entries: Sequence[ReplicaEntry], *, known: bool | None = None, set_aside: bool | None = None
    ) -> None:
        """Replace all entries; durable on return.

        `known` and `set_aside` set the attributes of the same name; None leaves them unchanged.
        """
        by_key = {_key_of(entry): entry for entry in entries}
        assert len(by_key) == len(entries), f"{len(entries)} entries with {len(by_key)} ids"
        known = self.known if known is None else known
        set_aside = self.set_aside if set_aside is None else set_aside
        content = list(entries) if known else Unknown(entries=list(entries), set_aside=set_aside)
        self._document.write(msgspec.msgpack.encode(content))
        self._take(entries)
        self.known, self.set_aside, self.written = known, set_aside, True

    def change(self, changes: ManifestChange, *, known: bool | None = None) -> None:
        """Change, add or remove (None) entries by key; durable on return.

        `known` sets the attribute of that name; None leaves it unchanged.
        """
        if not self.known or known is False:
            after = {**self._by_key, **changes}
            self.replace([entry for entry in after.values() if entry is not None], known=known)
            return
        encoded = dict(self._encoded)
        for key, entry in changes.items():
            if entry is None:
                encoded.pop(key, None)
            else:
                encoded[key] = _encoder.encode(entry)
        self._document.write(_head_of_array(len(encoded)) + b"".join(encoded.values()))
        self._encoded, self.written = encoded, True
        for key, entry in changes.items():
            before = self._by_key.get(key)
            # In this order: a reader finds the entry before or the one after, never none.
            if entry is None:
                self._by_key.pop(key, None)
            else:
                self._by_key[key] = self._by_group[entry.group] = entry
            if before is not None and before is not entry and self._by_group.get(before.group) is before:
                del self._by_group[before.group]
            if entry is not None and entry.state != "made":
                self._unmade[key] = entry
            else:
                self._unmade.pop(key, None)

    def _take(self, entries: Sequence[ReplicaEntry]) -> None:
        self._by_key = {_key_of(entry): entry for entry in entries}
        self._encoded = {key: _encoder.encode(entry) for key, entry in self._by_key.items()}
        self._by_group = {entry.group: entry for entry in entries}
        self._unmade = {key: entry for key, entry in self._by_key.items() if entry.state != "made"}


def _head_of_array(length: int) -> bytes:
    """Return the head of a msgpack array, as `msgspec` writes it."""
    if length < 16:
        return bytes([0x90 | length])
    return b"\xdc" + length.to_bytes(2) if length < 1 << 16 else b"\xdd" + length.to_bytes(4)


def _key_of(entry: ReplicaEntry) -> int:
    return entry.replica_id or -entry.log_id
