"""Sum up repeated audit records: the first of a kind is written as it is, the others become one record.

So a flood of refusals makes a bounded number of records, and each refusal is counted in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

import msgspec

from laminar.http.api.timestamps import format_time
from laminar.wire.audit import AuditRecord

WINDOW_MS: Final = 60_000
"""How long records with the same key are counted before their number is written."""

SEVERAL: Final = "(several)"
"""The value of the fields principal and address in a record that stands for several of them."""

_OTHERS: Final = ()
"""The key of all records that come after the most keys of a window are in use."""


class _Counted:
    """The records of a key after its first: one of them, their number, and their first and last time."""

    __slots__ = ("count", "first_ms", "last_ms", "record")

    def __init__(self, record: AuditRecord, now_ms: int) -> None:
        self.record = record
        self.count = 0
        self.first_ms = self.last_ms = now_ms


class Summaries:
    """Counts the records of one window of time by key: at most `most` keys, and one more for all others.

    A window makes at most `2 * most + 1` records: one at once for each key, and at its end one for each
    key with repetitions and one for all others.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._begun_ms = 0
        self._keys: set[Hashable] = set()
        self._counted: dict[Hashable, _Counted] = {}

    def add(self, key: Hashable, make: Callable[[], AuditRecord], *, now_ms: int) -> AuditRecord | None:
        """Return the record if it is the first of `key` in this window; else count it and return None."""
        if not self._keys:
            self._begun_ms = now_ms
        if key not in self._keys:
            if len(self._keys) < self._most:
                self._keys.add(key)
                return make()
            key = _OTHERS
        counted = self._counted.get(key)
        if counted is None:
            counted = self._counted[key] = _Counted(make(), now_ms)
        counted.count += 1
        counted.last_ms = now_ms
        return None

    def due(self, now_ms: int) -> bool:
        """Return whether the window is over. A clock that goes back ends it, too."""
        return bool(self._keys) and not 0 <= now_ms - self._begun_ms < WINDOW_MS

    def take(self) -> list[AuditRecord]:
        """Return the records that stand for the counted ones. The next record begins a new window."""
        counted, self._counted = self._counted, {}
        self._keys.clear()
        return [_summary(each, mixed=key == _OTHERS) for key, each in counted.items()]


def _summary(counted: _Counted, *, mixed: bool) -> AuditRecord:
    """Return one record for several.

    If they are `mixed` (of several keys), it has only what all of them share.
    """
    record = counted.record
    if counted.count == 1:
        return record
    if mixed:
        record = AuditRecord(
            kind=record.kind,
            time="",
            node=record.node,
            shard=record.shard,
            principal=SEVERAL,
            address=SEVERAL,
        )
    return msgspec.structs.replace(
        record,
        count=counted.count,
        first=format_time(counted.first_ms),
        time=format_time(counted.last_ms),
    )
