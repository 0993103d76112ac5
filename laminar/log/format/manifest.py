"""The manifest: the list of a shard's replicas, by which a missing replica is known as *lost*, not as new.

This module only stores the list; `laminar.node` decides what follows from it. The manifest is separate from
the checkpoint because it changes rarely, and must be readable even if the journal is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from laminar.log.disk.disk import Disk
from laminar.log.disk.document import Document


class ReplicaEntry(msgspec.Struct, kw_only=True):
    """One replica of one partition.

    `voters` are (replica id, node id) at creation; replica ids are never reused. `state` is "making" until
    the replica is complete, then "made"; `laminar.node` decides, and has a third one for replicas that move.
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
    """A manifest that may lack replicas, written because the one before was lost.

    It is replaced when the catalog has said which replicas there are. `set_aside`: the start that found
    the loss has finished with what the store directory held then. While False, each start preserves a
    copy of it again and begins without it (`laminar.log.recovery.store`).
    """

    entries: list[ReplicaEntry]
    set_aside: bool = True


_Content = list[ReplicaEntry] | Unknown
_DECODER: msgspec.msgpack.Decoder[_Content] = msgspec.msgpack.Decoder(_Content)


def decode_manifest(payload: bytes) -> _Content:
    """Return the entries of an encoded manifest, or an `Unknown` that holds them."""
    return _DECODER.decode(payload)


class Manifest:
    """The durable list of replicas, in memory and in its document.

    Not thread-safe: one writer at a time. `known`: `entries` names every replica that was created here and
    not removed since. If False, no replica may be created (docs/consensus.md#births-and-removals).
    `set_aside` as in `Unknown`. `written`: the document exists.
    """

    def __init__(self, disk: Disk, directory: str) -> None:
        self._document = Document(disk, directory, "manifest")
        self.entries: list[ReplicaEntry] = []
        self.known = True
        self.set_aside = True
        self.written = False

    def load(self) -> None:
        """Read the entries, and write them again: the copy may have been in the page cache only."""
        payload = self.read()
        if payload is not None:
            self._document.write(payload)

    def read(self) -> bytes | None:
        """Read the entries from the document, which is not changed; return its payload, None if none."""
        payload = self._document.read()
        self.written = payload is not None
        if payload is not None:
            found = decode_manifest(payload)
            if isinstance(found, Unknown):
                self.entries, self.known, self.set_aside = found.entries, False, found.set_aside
            else:
                self.entries = found
        return payload

    def replace(
        self, entries: Sequence[ReplicaEntry], *, known: bool | None = None, set_aside: bool | None = None
    ) -> None:
        """Replace the entries; durable on return.

        `known` and `set_aside` stay as they are if not given.
        """
        entries = list(entries)
        known = self.known if known is None else known
        set_aside = self.set_aside if set_aside is None else set_aside
        content = entries if known else Unknown(entries=entries, set_aside=set_aside)
        self._document.write(msgspec.msgpack.encode(content))
        self.entries, self.known, self.set_aside, self.written = entries, known, set_aside, True
