from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

import laminar
from laminar.testing.nodes import serve
from tests.outbox import postgresql
from tests.outbox.applications import DRIVERS, Application, connect_to


@pytest.fixture(scope="session")
def postgresql_socket() -> Iterator[Path]:
    with postgresql.server() as socket:
        yield socket


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve() as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[laminar.Client]:
    with laminar.connect(url, timeout=60) as client:
        yield client


@pytest.fixture
def topic(client: laminar.Client) -> laminar.Topic[bytes]:
    return client.create_topic(f"t{secrets.token_hex(4)}", partitions=1)


def make_application(driver: str, folder: Path, request: pytest.FixtureRequest) -> Application:
    if driver == "sqlite3":
        return Application(driver, str(folder / "app.db"))
    socket: Path = request.getfixturevalue("postgresql_socket")
    name = f"app_{secrets.token_hex(4)}"
    admin = connect_to(driver, f"{socket}:postgres")
    admin.autocommit = True
    admin.cursor().execute(f"CREATE DATABASE {name}")
    admin.close()
    return Application(driver, f"{socket}:{name}")


@pytest.fixture(params=DRIVERS)
def application(request: pytest.FixtureRequest, tmp_path: Path) -> Application:
    """A database of each kind, through each driver."""
    made = make_application(request.param, tmp_path, request)
    made.make_tables()
    return made


@pytest.fixture
def postgres(request: pytest.FixtureRequest, tmp_path: Path) -> Application:
    made = make_application("pg8000", tmp_path, request)
    made.make_tables()
    return made


@pytest.fixture
def sqlite(request: pytest.FixtureRequest, tmp_path: Path) -> Application:
    made = make_application("sqlite3", tmp_path, request)
    made.make_tables()
    return made
