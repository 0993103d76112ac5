"""The relay of an outbox: a program that appends committed rows to a topic, each once, in its own order.

A relay claims rows, stores their numbers (`laminar.outbox.table`), and sends them under these numbers by a
named producer. So the work of a relay that was killed is repeated under the same numbers, and the partitions
recognise what they have. Any failure ends the session: the relay releases connection, lock and producer, and
begins again as after `kill -9`. So there is only one way of recovery to get right.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from laminar.client.consume.stop_signal import at_sigterm
from laminar.client.errors import (
    AuthError,
    ConfigError,
    Error,
    Fenced,
    NotFound,
    OutcomeUnknown,
    ProduceError,
    Unavailable,
    Untrusted,
)
from laminar.client.sync.producer import Producer
from laminar.client.sync.topic import Topic
from laminar.client.trace_id import trace_id_bytes
from laminar.outbox.databases import Database, checked_name
from laminar.outbox.table import Claim, OutboxTable, TakenOver

_log = logging.getLogger("laminar.outbox")

MAX_ROWS = 1_000
MAX_BYTES = 8 << 20
POLL_S = 0.2
LONGEST_PAUSE_S = 5.0
# A partition remembers a producer's numbers for seven days (docs/clients.md). Some hours are left for clocks.
REMEMBERED_MS = 6 * 24 * 3_600_000

_headers = msgspec.json.Decoder(dict[str, str])


class BadRow(Error):
    """A row cannot become a record of the topic; the message, ``table`` and ``row`` (its id) name the row.

    Earlier rows are in the topic; later rows wait. Correct or delete the row.
    """

    def __init__(self, table: str, row: int, why: str, *, field: str | None = None) -> None:
        super().__init__(
            f"row {row} of {table} cannot be appended: {why}",
            code="bad_row",
            field=field,
            value=row,
            hint="rows behind it wait; change or delete it",
            outcome="not_applied",
        )
        self.table = table
        self.row = row


class _Record(NamedTuple):
    value: bytes
    key: bytes | None
    tag: str | None
    headers: Mapping[str, bytes] | None
    timestamp_ms: int | None
    trace_id: bytes | None
    deliver_at_ms: int | None


class Relay:
    """A relay sends the rows of an outbox to `topic`, and deletes them. One relay works at a time.

    `connect` opens a connection to the database: by `sqlite3`, `psycopg` or `pg8000`. `table` was made by
    `laminar.outbox.schema`. The producer's name is `name` with some digits that belong to the table. Up to
    `max_rows` rows of `max_bytes` in all are sent at a time. An empty table is polled every `poll` seconds.

    If a relay cannot know which rows were sent already, `run` raises an error; with `resend` it sends all
    rows of the table, and some may be in the topic twice.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        table: str,
        topic: Topic[bytes],
        name: str,
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        poll: float = POLL_S,
        resend: bool = False,
    ) -> None:
        if topic.codec is not None:
            raise ConfigError(
                "an outbox holds bytes: give a topic without a codec", code="codec", field="topic"
            )
        self.table = checked_name(table)
        self.topic = topic
        self.name = name
        self._connect = connect
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._poll_s = poll
        self._resend = resend
        self._stopped = False  # no event: `stop` may be called by a signal in the middle of its `wait`
        self._errors: tuple[type[Exception], ...] | None = None  # of the database, once it is known
        self._one_by_one = False
        self._sent = 0

    def stop(self) -> None:
        """Let `run` return once the rows that it is sending are done. From any thread."""
        self._stopped = True

    def run(self, *, until_empty: bool = False) -> int:
        """Send rows as they are committed, until `stop` or SIGTERM; return how many were sent.

        With `until_empty` return when the table is empty. While another relay works on the table this one
        waits. After a failure of the database or the cluster, which is logged, the relay tries again; but an
        error of the database before the first success is raised.

        Raises:
            BadRow: a row cannot become a record.
            NotFound: there is no such topic.
            ConfigError: the tables are not those of `laminar.outbox.schema`.
            Fenced: a relay with another database, a copy of this one, has begun under the same producer name.
            Error: (``set_back``) the topic has records that this database does not know: it was restored from
                a backup, or is a copy; (``in_doubt``) it is not known any more which of the claimed rows are
                in the topic.
        """
        self._sent = 0
        failures = 0
        with at_sigterm(self.stop):
            while not self._stopped:
                before = self._sent
                try:
                    with self._session(until_empty) as step:
                        while step() and not self._stopped:
                            pass
                    break
                except Exception as error:
                    if not self._may_pass(error):
                        raise
                    failures = 0 if self._sent > before else failures + 1
                    _log.warning("outbox %s: %s; it is tried again", self.table, error)
                self._pause(min(LONGEST_PAUSE_S, self._poll_s * 2 ** min(failures, 10)))
        return self._sent

    def _pause(self, seconds: float) -> bool:
        """Wait for `seconds`, or until `stop`; return whether the relay was not stopped."""
        end = time.monotonic() + seconds
        while not self._stopped and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, POLL_S))
        return not self._stopped

    def _may_pass(self, error: Exception) -> bool:
        """Return whether a new session may succeed after `error`."""
        if isinstance(error, Error):
            return error.retriable or isinstance(error, Unavailable | OutcomeUnknown | ProduceError)
        return isinstance(error, TakenOver) or (self._errors is not None and isinstance(error, self._errors))

    # -- a session -----------------------------------------------------------------------------

    @contextmanager
    def _session(self, until_empty: bool) -> Iterator[Callable[[], bool]]:
        """Lock the table and open a producer for the block; yield a function that sends the next rows.

        Each call sends the claimed rows and claims the next; it returns whether there is more to do.
        """
        database = Database(self._connect())
        outbox = OutboxTable(database, self.table)
        try:
            database.commit_durably()
            while not outbox.try_lock():
                if not self._pause(self._poll_s):
                    yield lambda: False
                    return
            # The lock comes first: from here on no other session of a relay has an open transaction.
            claim = outbox.begin(self.name, self.topic.name)
            self._errors = database.driver.errors
            with self.topic.producer(name=outbox.producer) as producer:
                # Epochs before this one are refused in all partitions: what they have reached is final.
                claim = self._compared(outbox, claim, producer.reached)

                def step() -> bool:
                    nonlocal claim
                    done = self._send(outbox, producer, claim)
                    self._sent += len(done.left)
                    claim = outbox.next_claim(done, max_rows=self._max_rows, max_bytes=self._max_bytes)
                    return bool(claim.ids) or (not until_empty and self._pause(self._poll_s))

                yield step
        except Error as error:
            if not _is_fenced(error):
                raise
            if not outbox.is_current():
                raise TakenOver(str(error)) from error
            outbox.doubt()
            raise Fenced(
                f"producer {outbox.producer} of outbox {self.table} was begun by a program that has another"
                " database: a copy of this one",
                code="fenced",
                field="table",
                value=self.table,
            ) from error
        finally:
            outbox.close()

    def _compared(self, outbox: OutboxTable, claim: Claim, reached: int) -> Claim:
        """Check that the numbers in the database agree with those in the topic; return the claim to send.

        The producer does not send a number again that the topic has, so it must never belong to another row.
        `reached` is the highest number that a partition has; only this run can append higher ones.
        """
        used = f"numbers up to {claim.last} are used, and {self.topic.name!r} has {reached}"
        if reached > claim.last:
            code, why = "set_back", f"the database was set back, or is a copy of another: {used}"
        elif claim.left and (reached < claim.sent or _age_ms(claim) > REMEMBERED_MS):
            code, why = "in_doubt", f"{len(claim.left)} rows may be in the topic already: {used}"
        else:
            return claim
        if self._resend:
            self._resend = False
            return outbox.restart(reached)
        raise Error(
            f"outbox {self.table}: {why}",
            code=code,
            field="resend",
            value=claim.last,
            limit=reached,
            hint="Relay(..., resend=True) sends all rows of the table; some may be in the topic twice then",
        )

    # -- sending -------------------------------------------------------------------------------

    def _send(self, outbox: OutboxTable, producer: Producer[bytes], claim: Claim) -> Claim:
        """Send the rows of a claim; return the claim, with what was sent, when they are durable in the topic.

        If a batch is refused, the rows are sent one by one in a new session, to find the row at fault.

        Raises:
            BadRow: a row cannot become a record; all rows before it are durable and deleted.
        """
        rows = outbox.rows(claim)
        if not rows:
            return claim
        if len(rows) < len(claim.left):
            there = {row[0] for _, row in rows}
            gone = [each for each in claim.left if each not in there]
            _log.warning("outbox %s: rows %s were deleted while they were sent", self.table, gone)
        for number, row in rows:
            try:
                record = _record(self.table, row)
                producer.send(
                    record.value,
                    record.key,
                    tag=record.tag,
                    headers=record.headers,
                    timestamp_ms=record.timestamp_ms,
                    trace_id=record.trace_id,
                    deliver_at=record.deliver_at_ms,
                    number=number,
                )
                if self._one_by_one:
                    producer.wait()
                    claim = claim.with_sent(number)
            except Error as error:
                if not (isinstance(error, BadRow) or _is_of_a_row(error)):
                    raise
                if not self._one_by_one:
                    self._one_by_one = True
                    raise _OneByOne from error
                outbox.note_done(claim, number - 1)
                self._one_by_one = False
                raise (
                    error if isinstance(error, BadRow) else BadRow(self.table, row[0], str(error))
                ) from error
        try:
            producer.wait()
        except ProduceError as error:
            if _is_of_a_row(error):
                self._one_by_one = True
            raise
        self._one_by_one = False
        return claim.with_sent(rows[-1][0])


class _OneByOne(Unavailable):
    """Raised to begin a new session in which the claimed rows are sent one by one."""

    def __init__(self) -> None:
        super().__init__("a row was refused: the rows are sent one by one", code="one_by_one")


def _is_of_a_row(error: Error) -> bool:
    """Return whether `error` refuses a record for good, so that a row is at fault."""
    if isinstance(error, ProduceError):
        return any(_is_of_a_row(each.error) for each in error.undelivered)
    passing = isinstance(error, Unavailable | OutcomeUnknown | Fenced | NotFound | AuthError | Untrusted)
    return not passing and not error.retriable


def _is_fenced(error: Error) -> bool:
    if isinstance(error, ProduceError):
        return any(isinstance(each.error, Fenced) for each in error.undelivered)
    return isinstance(error, Fenced)


def _age_ms(claim: Claim) -> int:
    return time.time_ns() // 1_000_000 - claim.claimed_ms


def _record(table: str, row: tuple[Any, ...]) -> _Record:
    """Return the record to append for a row. Raises BadRow if the row cannot become one."""
    row_id, value, key, tag, headers, timestamp_ms, trace_id, deliver_at_ms = row
    if isinstance(headers, str | bytes):
        try:
            headers = _headers.decode(headers)
        except msgspec.MsgspecError as error:
            raise BadRow(table, row_id, f"headers: {error}", field="headers") from None
    if headers is not None and not (
        isinstance(headers, dict) and all(isinstance(cell, str) for cell in headers.values())
    ):
        raise BadRow(table, row_id, "headers are no JSON object of strings", field="headers")
    if tag is not None and not isinstance(tag, str):
        raise BadRow(table, row_id, f"tag is {type(tag).__name__}, not text", field="tag")
    for name, time_ms in (("timestamp_ms", timestamp_ms), ("deliver_at_ms", deliver_at_ms)):
        if time_ms is not None and not isinstance(time_ms, int):
            raise BadRow(table, row_id, f"{name} is {type(time_ms).__name__}", field=name)
    try:
        trace = trace_id_bytes(trace_id)
    except ConfigError as error:
        raise BadRow(table, row_id, error.message, field="trace_id") from None
    raw = _bytes(table, row_id, "value", value)
    if raw is None:
        raise BadRow(table, row_id, "it has no value", field="value")
    return _Record(
        raw,
        _bytes(table, row_id, "key", key),
        tag,
        None if headers is None else {name: cell.encode() for name, cell in headers.items()},
        timestamp_ms,
        trace,
        deliver_at_ms,
    )


def _bytes(table: str, row_id: int, column: str, cell: Any) -> bytes | None:
    if cell is None or isinstance(cell, bytes):
        return cell
    if isinstance(cell, str):
        return cell.encode()
    raise BadRow(table, row_id, f"{column} is {type(cell).__name__}, neither bytes nor text", field=column)
