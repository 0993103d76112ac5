"""The tables of an outbox: which rows are claimed (being sent) under which numbers, and which are done.

The relay cannot use the ids of rows as numbers of records: a row with a low id may be committed after rows
with higher ones were sent and deleted. So the relay claims the rows that it sees, in one transaction that
stores their ids, and gives them the numbers after `checkpoint`. Until they are done the same rows keep the
same numbers, whatever is killed in between. Rows are deleted by their ids, never by a range: other rows in it
may have been committed since.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from laminar.client.errors import ConfigError
from laminar.outbox.databases import Database, checked_name

_ids = msgspec.json.Decoder(list[int | None])

COLUMNS = "id, value, key, tag, headers, timestamp_ms, trace_id, deliver_at_ms"


class TakenOver(Exception):
    """Raised if another relay has begun to work on this table since."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The rows that are being sent: the row with id ``ids[i]`` has the number ``checkpoint + 1 + i``.

    An id of None stands for a row that is done already. Numbers up to `checkpoint` are not used again. `sent`
    is the highest number whose record is known to be in the topic. `claimed_ms` is the time of the claim.
    """

    checkpoint: int
    ids: Sequence[int | None]
    claimed_ms: int
    sent: int

    @property
    def left(self) -> list[int]:
        """The ids of the claimed rows that are not done (sent and deleted) yet."""
        return [each for each in self.ids if each is not None]

    def with_sent(self, number: int) -> Claim:
        """Return a copy of the claim with `number` as the highest one known to be in the topic."""
        return replace(self, sent=number)

    @property
    def last(self) -> int:
        """The highest number of the claim: no higher one was ever sent."""
        return self.checkpoint + len(self.ids)


class OutboxTable:
    """The outbox table of the application, and the relay's own table beside it, over one connection.

    Only the relay that began last can change anything: each statement that writes compares the number of its
    run. The lock only lets other relays wait; a connection pooler between relay and database may lose it.
    """

    def __init__(self, database: Database, table: str) -> None:
        self._db = database
        self._table = checked_name(table)
        self._run = 0
        self.producer = ""  # its name, known once a run has begun
        self._size = "length(CAST(value AS blob))" if database.driver.is_sqlite else "octet_length(value)"

    def try_lock(self) -> bool:
        """Take the table's lock if no other relay has it; return whether this one has it."""
        return self._db.try_lock(self._table)

    def begin(self, name: str, topic: str) -> Claim:
        """Begin a run; return the claim of the run before. Earlier runs cannot change anything from now on.

        The producer's name is `name` followed by random digits, which are drawn once for each outbox: so
        numbers of two outboxes are never confused, even if their relays have the same name.

        Raises:
            ConfigError: rows are claimed under another name or for another topic; or the tables are not as
                `schema` makes them.
        """
        with self._db.transaction():
            if not self._db.change(f"UPDATE {self._table}_relay SET run = run + 1 WHERE id = 1"):
                raise ConfigError(
                    f"{self._table}_relay has no row", code="table", hint="see laminar.outbox.schema"
                )
            ((self._run, producer, known, checkpoint, sent, claimed, claimed_ms),) = self._db.rows(
                "SELECT run, producer, topic, checkpoint, sent, claimed, claimed_ms"
                f" FROM {self._table}_relay WHERE id = 1"
            )
            claim = Claim(int(checkpoint), _ids.decode(claimed), int(claimed_ms), int(sent))
            same = producer.rpartition(".")[0] == name
            if claim.left and not (same and known == topic):
                raise ConfigError(
                    f"rows of {self._table} are being sent to topic {known!r} by {producer!r}",
                    code="relay",
                    field="topic" if same else "name",
                    value=topic if same else name,
                    limit=known if same else producer.rpartition(".")[0],
                    hint="let that relay empty the table before its name or topic changes",
                )
            if not (same and known == topic):
                producer = f"{name}.{secrets.token_hex(4)}"
                claim = Claim(0, (), 0, 0)
                self._change(
                    "producer = ?, topic = ?, checkpoint = 0, sent = 0, claimed = ?", producer, topic, "[]"
                )
            self.producer = producer
        return claim

    def is_current(self) -> bool:
        """Return whether no other run has begun since this one did."""
        return self._db.rows(f"SELECT run FROM {self._table}_relay WHERE id = 1") == [(self._run,)]

    def doubt(self) -> None:
        """Mark the claimed rows as doubtful, so that later runs send none before an operator decides."""
        with self._db.transaction():
            self._change("claimed_ms = 0")

    def restart(self, last: int) -> Claim:
        """Drop the claim, and use no number up to `last` again; return the new, empty claim."""
        with self._db.transaction():
            self._change("checkpoint = ?, sent = ?, claimed = ?, claimed_ms = 0", last, last, "[]")
        return Claim(last, (), 0, last)

    def rows(self, claim: Claim) -> list[tuple[int, tuple[Any, ...]]]:
        """Return (number, row) for each row of a claim that is not done (sent, deleted) and still exists."""
        if not claim.left:
            return []
        found = self._db.rows(f"SELECT {COLUMNS} FROM {self._table} WHERE id IN ({_listed(claim.left)})")
        by_id = {row[0]: row for row in found}
        numbers = range(claim.checkpoint + 1, claim.last + 1)
        return [
            (number, by_id[each]) for number, each in zip(numbers, claim.ids, strict=True) if each in by_id
        ]

    def note_done(self, claim: Claim, done: int) -> None:
        """Delete the rows of a claim with numbers up to `done`; the others stay claimed."""
        count = done - claim.checkpoint
        left = [None] * count + list(claim.ids[count:])
        with self._db.transaction():
            self._delete([each for each in claim.ids[:count] if each is not None])
            self._change("claimed = ?, sent = ?", msgspec.json.encode(left).decode(), claim.sent)

    def next_claim(self, claim: Claim, *, max_rows: int, max_bytes: int) -> Claim:
        """Delete the rows of `claim`, all of which are sent, and claim the next ones, in one transaction."""
        if not claim.left and not self._db.rows(f"SELECT 1 FROM {self._table} LIMIT 1"):
            return claim if not claim.ids else Claim(claim.last, (), 0, claim.sent)
        with self._db.transaction():
            self._delete(claim.left)
            found = self._db.rows(f"SELECT id, {self._size} FROM {self._table} ORDER BY id LIMIT {max_rows}")
            ids: list[int] = []
            total = 0
            for row_id, size in found:
                if not isinstance(row_id, int):
                    raise ConfigError(
                        f"{self._table}.id is no integer", code="table", field="id", value=row_id
                    )
                total += int(size or 0)
                if ids and total > max_bytes:
                    break
                ids.append(row_id)
            taken = Claim(claim.last, ids, time.time_ns() // 1_000_000, claim.sent)
            self._change(
                "checkpoint = ?, sent = ?, claimed = ?, claimed_ms = ?",
                taken.checkpoint,
                taken.sent,
                msgspec.json.encode(ids).decode(),
                taken.claimed_ms,
            )
        return taken

    def _delete(self, ids: Sequence[int]) -> None:
        if ids:
            self._db.change(f"DELETE FROM {self._table} WHERE id IN ({_listed(ids)})")

    def _change(self, what: str, *values: object) -> None:
        sql = f"UPDATE {self._table}_relay SET {what} WHERE id = 1 AND run = ?"
        if self._db.change(sql, *values, self._run) != 1:
            raise TakenOver(f"another relay has begun on {self._table}")

    def close(self) -> None:
        """Close the connection, which releases the lock."""
        self._db.close()


def _listed(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))
