"""The table of idempotency keys of one partition, by which a repeated request is recognised.

The header of a batch that is appended with a key has the flag `Flag.KEYED`. In place of the producer id it
has 16 bytes of the key's hash; in place of the sequence number, 63 bits of a hash of the whole request. So
the table is a function of the log, like that of the producers
(`laminar.node.partition.state.producers`): only `appended` and `truncated` change it, and keys expire by the
append times in the log, never by a clock. The table stores hashes and places of records, but neither clients
nor answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from laminar.batch import Header
from laminar.batch.header import Flag

MAX_KEYS = 32_768
# Keys that are older than this, by append times, are forgotten.
AGE_MS = 24 * 3_600_000
# No key younger than this is forgotten, however many keys follow: see `full_for_ms`.
KEPT_MS = 5 * 60_000


class KeyEntry(msgspec.Struct, frozen=True, array_like=True):
    """The batch that was appended with a key.

    `key_id` and `content` are the hashes of the key and of the request. `index` is the batch's Raft index,
    `offset` its first offset, `count` the number of its records, `time_ms` its append time. If its records
    were delayed, `delayed` is the number of the first one (`delayed_records`) and `offset` is meaningless.
    """

    key_id: bytes
    content: int
    index: int
    offset: int
    count: int
    time_ms: int
    delayed: int | None = None


class IdempotencyKeys:
    """The table of idempotency keys of one partition, bounded by count and by age in the log."""

    __slots__ = ("_undo", "by_key")

    def __init__(self) -> None:
        self.by_key: dict[bytes, KeyEntry] = {}
        """The batches by the hash of their key, in the order of the log; only this class changes it."""
        # (index, key, its entry before) of entries that may be truncated.
        self._undo: deque[tuple[int, bytes, KeyEntry | None]] = deque()

    def __len__(self) -> int:
        return len(self.by_key)

    def get(self, key_id: bytes) -> KeyEntry | None:
        """Return the batch that was appended with this key, if it is remembered."""
        return self.by_key.get(key_id)

    def full_for_ms(self, now_ms: int) -> int:
        """Return for how long (ms) new keys must be refused, so that none younger than `KEPT_MS` is evicted.

        Return 0 if new keys need not be refused. The leader refuses them for that time. In this way a flood
        of new keys delays only itself, and earlier keys are still recognised. The table itself does not
        refuse; it takes every key that is in the log.
        """
        if len(self.by_key) < MAX_KEYS:
            return 0
        oldest = next(iter(self.by_key.values()))
        return max(0, oldest.time_ms + KEPT_MS - now_ms)

    def complete_from_ms(self, now_ms: int) -> int:
        """Return the append time (ms) since which all keys are in the table; older ones may be forgotten."""
        if len(self.by_key) < MAX_KEYS:
            return now_ms - AGE_MS
        return next(iter(self.by_key.values())).time_ms

    def appended(self, header: Header, *, delayed: tuple[int, int] | None = None) -> None:
        """Apply a batch of records, with a key or without, that is now the log's last entry.

        A batch without a key may change the table, too, because old keys expire by its append time; it does
        nothing to an empty table. `delayed` are the number of the first record and the count of records, if
        they are delayed.
        """
        keyed = bool(header.flags & Flag.KEYED)
        self._expire(header.index, header.append_time_ms, at_most=MAX_KEYS - keyed)
        if not keyed:
            return
        self._undo.append((header.index, header.producer_id, self.by_key.pop(header.producer_id, None)))
        number, count = delayed or (None, header.count)
        self.by_key[header.producer_id] = KeyEntry(
            key_id=header.producer_id,
            content=header.sequence,
            index=header.index,
            offset=header.base_offset,
            count=count,
            time_ms=header.append_time_ms,
            delayed=number,
        )

    def _expire(self, index: int, now_ms: int, *, at_most: int) -> None:
        while self.by_key:
            oldest = next(iter(self.by_key.values()))
            if len(self.by_key) <= at_most and oldest.time_ms + AGE_MS >= now_ms:
                return
            self._undo.append((index, oldest.key_id, oldest))
            del self.by_key[oldest.key_id]

    def truncated(self, index: int) -> None:
        """Roll back entry `index` and all after it, which were truncated."""
        touched = False
        while self._undo and self._undo[-1][0] >= index:
            _, key_id, before = self._undo.pop()
            touched = True
            if before is None:
                self.by_key.pop(key_id, None)
            else:
                self.by_key[key_id] = before
        if touched:
            # Entries restored by the rollback were put at the end; sort them back into the log's order.
            self.by_key = dict(sorted(self.by_key.items(), key=lambda item: item[1].index))

    def committed(self, index: int) -> None:
        """Forget how to roll back entries up to `index`: they are committed."""
        undo = self._undo
        while undo and undo[0][0] <= index:
            undo.popleft()

    def stored(self) -> list[KeyEntry]:
        """Return all keys as of the log's end, oldest first, as values for snapshots."""
        return list(self.by_key.values())

    def stored_at(self, index: int) -> list[KeyEntry]:
        """Return the table as of entry `index`, which is the last committed one or a later one."""
        copy = IdempotencyKeys()
        copy.by_key = dict(self.by_key)
        copy._undo = deque(self._undo)
        copy.truncated(index + 1)
        return copy.stored()

    def restore(self, entries: Iterable[KeyEntry]) -> None:
        """Replace the table by one from a snapshot; no change before this can be rolled back."""
        self._undo.clear()
        self.by_key = {entry.key_id: entry for entry in entries}
