"""An application's database as the tests use it: the same questions to SQLite and to PostgreSQL."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laminar.outbox import schema

# psycopg is under the LGPL, and no requirement of the project: it is tested where it is installed.
DRIVERS = [name for name in ("sqlite3", "pg8000", "psycopg") if importlib.util.find_spec(name)]


def connect_to(driver: str, place: str) -> Any:
    """Open a connection. `place` is a file, or a socket and a database's name."""
    if driver == "sqlite3":
        # Writers of a file take turns by chance: on a slow disk one of five may wait for long.
        connection = sqlite3.connect(place, timeout=120)
        connection.execute("PRAGMA journal_mode = WAL")
        return connection
    socket, _, name = place.rpartition(":")
    if driver == "pg8000":
        import pg8000.dbapi

        # By its default it reads all certificates of this machine for each connection, also to a socket file.
        return pg8000.dbapi.connect("laminar", unix_sock=socket, database=name, ssl_context=False)
    import psycopg

    return psycopg.connect(host=str(Path(socket).parent), user="laminar", dbname=name)


class Application:
    """A database with an outbox, and one connection to it that inserts rows."""

    def __init__(self, driver: str, place: str) -> None:
        self.driver = driver
        self.place = place
        self.kind = "sqlite" if driver == "sqlite3" else "postgresql"

    def connect(self) -> Any:
        return connect_to(self.driver, self.place)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Any]:
        """A connection for the block: committed at its end, rolled back if it raises."""
        connection = self.connect()
        try:
            yield connection
            connection.commit()
        except BaseException:
            connection.rollback()
            raise
        finally:
            connection.close()

    def run(self, script: str) -> None:
        with self.opened() as connection:
            for statement in filter(str.strip, script.split(";\n")):
                connection.cursor().execute(statement)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with self.opened() as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            return [tuple(row) for row in cursor.fetchall()]

    def make_tables(self, table: str = "outbox") -> None:
        self.run(schema(self.kind, table))

    def insert(self, connection: Any, value: bytes, **columns: Any) -> None:
        """Insert a row in the connection's transaction."""
        if "headers" in columns:
            columns["headers"] = json.dumps(columns["headers"])
        mark = "?" if self.kind == "sqlite" else "%s"
        names = ["value", *columns]
        connection.cursor().execute(
            f"INSERT INTO outbox ({', '.join(names)}) VALUES ({', '.join([mark] * len(names))})",
            (value, *columns.values()),
        )

    def add(self, *values: bytes, **columns: Any) -> None:
        """Insert rows, and commit them."""
        with self.opened() as connection:
            for value in values:
                self.insert(connection, value, **columns)
