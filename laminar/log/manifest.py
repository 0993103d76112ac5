"""Which replicas a shard holds: the list that makes a missing one *lost* instead of new.

It knows nothing of what the entries mean; `laminar.node` decides. Apart from the checkpoint because it
changes rarely, and must be readable where the journal is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from laminar.log.disk import Disk
from laminar.log.document import Document


class ReplicaEntry(msgspec.Struct, kw_only=True):
    """One replica of one partition. `voters` are (replica id, node id) at creation; ids are never reused."""

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


_DECODER = msgspec.msgpack.Decoder(list[ReplicaEntry])


class Manifest:
    """The durable list of entries, in memory and in its document. Not thread-safe: one writer at a time."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._document = Document(disk, directory, "manifest")
        self.entries: list[ReplicaEntry] = []

    def load(self) -> None:
        """Read the entries and write them again: what was read may have been in the page cache only."""
        payload = self.look()
        if payload is not None:
            self._document.write(payload)

    def look(self) -> bytes | None:
        """Read the entries, and change nothing; what they were read from."""
        payload = self._document.read()
        if payload is not None:
            self.entries = _DECODER.decode(payload)
        return payload

    def replace(self, entries: Sequence[ReplicaEntry]) -> None:
        """Durable when this returns."""
        entries = list(entries)
        self._document.write(msgspec.msgpack.encode(entries))
        self.entries = entries

    def exists(self) -> bool:
        return self._document.exists()
