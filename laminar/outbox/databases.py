"""The differences between SQLite and PostgreSQL, as seen through DB-API 2.0.

PostgreSQL may be used through `psycopg` or `pg8000`, SQLite through `sqlite3`. The rest of the outbox writes
SQL that both understand, with ``?`` for its values.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from laminar.client.errors import ConfigError

DRIVERS = ("sqlite3", "psycopg", "pg8000")

_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*\.)?[A-Za-z_][A-Za-z0-9_]*")
# The high half of the key of a relay's lock; the low half is the number of the table.
_LOCK = 0x6C6D6F78


def checked_name(table: str) -> str:
    """Return the name `table` after checking that it can be put into SQL; ``schema.table`` is allowed."""
    if not _NAME.fullmatch(table):
        raise ConfigError(
            f"{table!r} is no name of a table: letters, digits and _, and a schema before a dot",
            code="table",
            field="table",
            value=table,
        )
    return table


class Driver:
    """The DB-API driver of a connection: SQLite or PostgreSQL, its errors, and its form of parameters."""

    def __init__(self, connection: Any) -> None:
        self.name = type(connection).__module__.partition(".")[0]
        if self.name not in DRIVERS:
            raise ConfigError(
                f"a connection of {type(connection).__module__} is not understood",
                code="driver",
                value=self.name,
                limit=list(DRIVERS),
            )
        self._module = sys.modules[self.name]
        self.is_sqlite = self.name == "sqlite3"
        self.errors: tuple[type[Exception], ...] = (self._module.Error, OSError)

    def execute(self, connection: Any, sql: str, *values: object) -> Any:
        """Execute a statement; return its cursor, whose rows are always tuples, also with a row factory."""
        if self.name == "psycopg":
            cursor = connection.cursor(row_factory=self._module.rows.tuple_row)
        else:
            cursor = connection.cursor()
        if self.is_sqlite:
            cursor.row_factory = None
            return cursor.execute(sql, values)
        cursor.execute(sql.replace("?", "%s"), values)
        return cursor

    def begins_itself(self, connection: Any) -> bool:
        """Return whether the connection begins a transaction by itself at the first change."""
        if self.is_sqlite:
            mode = getattr(connection, "autocommit", -1)  # -1: as before Python 3.12
            return connection.isolation_level is not None if mode == -1 else not mode
        return not connection.autocommit

    def is_in_transaction(self, connection: Any) -> bool:
        """Return whether a transaction is open; always False with `pg8000`, which does not show it."""
        if self.is_sqlite:
            return bool(connection.in_transaction)
        return self.name == "psycopg" and bool(connection.info.transaction_status)


class Database:
    """A connection that only this object uses. Only `transaction` begins a transaction on it."""

    def __init__(self, connection: Any) -> None:
        self.driver = Driver(connection)
        self._connection = connection
        self._lock: Any = None
        connection.rollback()
        if not self.driver.is_sqlite or hasattr(connection, "autocommit"):
            connection.autocommit = True
        else:
            connection.isolation_level = None

    def commit_durably(self) -> None:
        """Make commits of this connection wait until they are on disk, whatever the server's default is."""
        if self.driver.is_sqlite:
            self.rows("PRAGMA synchronous = FULL")
        else:
            setting = "'synchronous_commit'"
            self.rows(f"SELECT set_config({setting}, 'on', false) WHERE current_setting({setting}) = 'off'")

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Execute a query; return its rows."""
        return list(self.driver.execute(self._connection, sql, *values).fetchall())

    def change(self, sql: str, *values: object) -> int:
        """Execute a statement that changes rows; return their number."""
        return int(self.driver.execute(self._connection, sql, *values).rowcount)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit at the end of the block; roll back if it raises.

        Each statement sees what was committed before it. In SQLite no other connection writes meanwhile.
        """
        run = self.driver.execute
        sqlite = self.driver.is_sqlite
        run(self._connection, "BEGIN IMMEDIATE" if sqlite else "BEGIN ISOLATION LEVEL READ COMMITTED")
        try:
            yield
        except BaseException:
            # After a lost connection this fails as well; the first error says what happened.
            with contextlib.suppress(*self.driver.errors):
                run(self._connection, "ROLLBACK")
            raise
        run(self._connection, "COMMIT")

    def try_lock(self, table: str) -> bool:
        """Take the lock of `table` if no other connection has it; return whether this one has it now.

        The lock is released when the connection ends, so also when the process is killed. In PostgreSQL it is
        an advisory lock. SQLite can only lock a whole database: there it is the lock of an empty database
        file beside the application's.
        """
        if not self.driver.is_sqlite:
            key = f"({_LOCK}::bigint << 32) | '{table}'::regclass::oid::bigint"
            ((taken,),) = self.rows(f"SELECT pg_try_advisory_lock({key})")
            return bool(taken)
        file = next(file for _, name, file in self.rows("PRAGMA database_list") if name == "main")
        if not file:
            return True  # in memory, so it is this connection's alone
        import sqlite3

        lock = sqlite3.connect(f"{file}-{table}-relay", timeout=0, isolation_level=None)
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            lock.close()
            return False
        self._lock = lock
        return True

    def close(self) -> None:
        """Close the connection, which releases the lock. Never raises."""
        for connection in (self._connection, self._lock):
            if connection is not None:
                with contextlib.suppress(*self.driver.errors):
                    connection.close()
