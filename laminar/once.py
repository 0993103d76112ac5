"""Effects of jobs in an application's database, each once, although a job may be given out several times.

A job (a record that a channel gives to a consumer) is given out again if its consumer dies, is slow, or gets
no answer to its acknowledgement. `Done` writes channel, partition and offset of the job into a table, in the
transaction of the job's effects. So both are stored or neither, and a consumer that gets a job again finds
out whether it had its effects. `docs/outbox.md` has the guarantees and the reasons.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from laminar.client.errors import ConfigError
from laminar.outbox.databases import Driver, checked_name

FORGET_EVERY = 1_000
"""Rows of a partition are deleted when the channel has done this many records more."""

_TABLES = """\
CREATE TABLE {table} (
    channel bigint NOT NULL,
    partition_number integer NOT NULL,
    record_offset bigint NOT NULL,
    PRIMARY KEY (channel, partition_number, record_offset)
);
CREATE TABLE {table}_floor (
    channel bigint NOT NULL,
    partition_number integer NOT NULL,
    floor bigint NOT NULL,
    PRIMARY KEY (channel, partition_number)
);
"""


class OfChannel(Protocol):
    """The attributes of a job that `Done` uses; `laminar.Job` and `laminar.aio.Job` have them."""

    @property
    def channel_id(self) -> int:
        """The number of the channel."""

    @property
    def partition(self) -> int:
        """The partition of the record."""

    @property
    def offset(self) -> int:
        """The offset of the record."""

    @property
    def floor(self) -> int:
        """The offset before which all records are acknowledged."""


def schema(table: str = "done") -> str:
    """Return the SQL statements that create the tables of `Done`, for PostgreSQL and SQLite alike."""
    return _TABLES.format(table=checked_name(table))


class Done:
    """The list of the jobs that are done, in `table` of a database, made by `laminar.once.schema`.

    `connection` is the application's: of `sqlite3`, `psycopg` or `pg8000`. Only one thread at a time may use
    the connection and this object.
    """

    def __init__(self, connection: Any, table: str = "done") -> None:
        self._connection = connection
        self._table = checked_name(table)
        self._driver = Driver(connection)

    @contextlib.contextmanager
    def first(self, job: OfChannel) -> Iterator[bool]:
        """Begin a transaction; yield True if the job's effects are not in the database yet.

        ``with done.first(job) as fresh:``. The end of the block commits; if the block raises, all is rolled
        back, and `fresh` is True again the next time. Acknowledge the job after the block, not in it.
        """
        begins_itself = self._driver.begins_itself(self._connection)
        if not begins_itself:
            if self._driver.is_in_transaction(self._connection):
                raise ConfigError("a transaction is open: use `add` in it", code="transaction")
            self._execute("BEGIN")
        try:
            yield self._add(job)
        except BaseException:
            # After a lost connection this fails as well; the first error says what happened.
            with contextlib.suppress(*self._driver.errors):
                self._connection.rollback() if begins_itself else self._execute("ROLLBACK")
            raise
        if begins_itself:
            self._connection.commit()
        else:
            self._execute("COMMIT")

    def add(self, job: OfChannel) -> bool:
        """Note the job as done in the caller's transaction, which the caller commits or rolls back.

        Return True if the job's effects are not in the database yet. Call this before the effects. If another
        consumer has the same job in an open transaction, the call waits for the end of that.

        Raises:
            ConfigError: no transaction is open, and the connection begins none by itself; or the isolation
                level is `repeatable read`.
        """
        connection = self._connection
        if not (self._driver.begins_itself(connection) or self._driver.is_in_transaction(connection)):
            raise ConfigError("each statement is committed at once: use `first`", code="transaction")
        return self._add(job)

    def _add(self, job: OfChannel) -> bool:
        channel = (job.channel_id, job.partition)
        added = self._execute(
            f"INSERT INTO {self._table} VALUES (?, ?, ?) ON CONFLICT DO NOTHING", *channel, job.offset
        )
        if added.rowcount == 0:
            return False
        # Behind the insert, which waits for a transaction that deletes the same row: its floor is seen here.
        floor = self._floor(channel)
        if job.floor - floor >= FORGET_EVERY:
            self._forget(channel, job.floor, is_new=floor < 0)
        return job.offset >= floor

    def _floor(self, channel: tuple[int, int]) -> int:
        """Return the offset below which jobs are done and their rows deleted; -1 if no row was deleted."""
        sqlite = self._driver.is_sqlite
        isolation = "'serializable'" if sqlite else "current_setting('transaction_isolation')"
        ((floor, level),) = self._execute(
            f"SELECT (SELECT floor FROM {self._table}_floor WHERE channel = ? AND partition_number = ?),"
            f" {isolation}",
            *channel,
        ).fetchall()
        if level == "repeatable read":
            raise ConfigError(
                "repeatable read does not see what others have deleted since it began",
                code="isolation",
                value=level,
                limit=["read committed", "serializable"],
            )
        return -1 if floor is None else int(floor)

    def _forget(self, channel: tuple[int, int], floor: int, *, is_new: bool) -> None:
        """Delete the rows of jobs below `floor`, unless another transaction is just doing that."""
        where = "channel = ? AND partition_number = ?"
        if is_new:
            sql = f"INSERT INTO {self._table}_floor VALUES (?, ?, 0) ON CONFLICT DO NOTHING"
            self._execute(sql, *channel)
        # Not waited for: that transaction may be as long as the work of its job.
        unlocked = "" if self._driver.is_sqlite else " FOR UPDATE SKIP LOCKED"
        found = self._execute(f"SELECT floor FROM {self._table}_floor WHERE {where}{unlocked}", *channel)
        if any(int(before) < floor for (before,) in found.fetchall()):
            self._execute(f"UPDATE {self._table}_floor SET floor = ? WHERE {where}", floor, *channel)
            self._execute(f"DELETE FROM {self._table} WHERE {where} AND record_offset < ?", *channel, floor)

    def _execute(self, sql: str, *values: object) -> Any:
        return self._driver.execute(self._connection, sql, *values)
