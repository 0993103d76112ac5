"""The effects of a job are in the database once, though the job comes more often."""

from __future__ import annotations

import sqlite3
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

import laminar
from laminar.once import FORGET_EVERY, Done, schema
from tests.outbox.applications import Application

Topic = laminar.Topic[bytes]
# It ends what hangs, and judges nothing.
PATIENCE_S = 120


@dataclass
class GivenJob:
    """A job as `Done` sees it."""

    offset: int
    floor: int = 0
    channel_id: int = 7
    partition: int = 0


class Effects:
    """A database with `done`, and a table in which each job's effect is a row."""

    def __init__(self, application: Application) -> None:
        self.application = application
        application.run(schema() + "CREATE TABLE effects (place bigint);\n")
        self.connection = application.connect()

    def work(self, job: GivenJob | laminar.Job[bytes], *, fail: bool = False) -> bool:
        with Done(self.connection).first(job) as fresh:
            if fresh:
                self.effect(self.connection, job.offset)
            if fail:
                raise ZeroDivisionError
        return fresh

    def effect(self, connection: Any, place: int) -> None:
        connection.cursor().execute(f"INSERT INTO effects VALUES ({place})")

    def places(self) -> list[int]:
        return [place for (place,) in self.application.rows("SELECT place FROM effects ORDER BY place")]

    def count(self) -> int:
        ((count,),) = self.application.rows("SELECT count(*) FROM done")
        return int(count)


@pytest.fixture
def effects(application: Application, request: pytest.FixtureRequest) -> Effects:
    made = Effects(application)
    request.addfinalizer(made.connection.close)
    return made


def test_a_job_that_comes_again_is_not_fresh(effects: Effects) -> None:
    assert effects.work(GivenJob(3))
    assert not effects.work(GivenJob(3))
    assert effects.work(GivenJob(3, partition=1))
    assert effects.work(GivenJob(3, channel_id=8))

    assert [3, 3, 3] == effects.places()


def test_what_is_rolled_back_is_fresh_the_next_time(effects: Effects) -> None:
    with pytest.raises(ZeroDivisionError):
        effects.work(GivenJob(3), fail=True)
    assert [] == effects.places()

    assert effects.work(GivenJob(3))
    assert [3] == effects.places()


def test_a_connection_without_implicit_transactions_is_given_one(
    effects: Effects, application: Application
) -> None:
    """Else the job would be noted before its effects are there."""
    connection = effects.connection
    if application.kind == "sqlite":
        connection.isolation_level = None
    else:
        connection.autocommit = True
    with pytest.raises(laminar.ConfigError, match="use `first`"):
        Done(connection).add(GivenJob(3))
    with pytest.raises(ZeroDivisionError):
        effects.work(GivenJob(3), fail=True)
    assert ([], 0) == (effects.places(), effects.count())

    assert effects.work(GivenJob(3))
    assert not effects.work(GivenJob(3))
    assert [3] == effects.places()


def test_add_leaves_the_transaction_to_its_caller(effects: Effects, application: Application) -> None:
    done = Done(effects.connection)
    assert done.add(GivenJob(3))
    effects.connection.rollback()
    assert done.add(GivenJob(3))
    effects.connection.commit()
    assert not done.add(GivenJob(3))
    effects.connection.rollback()

    if application.driver != "pg8000":  # which says of no connection whether it is in a transaction
        if application.kind == "sqlite":
            effects.connection.isolation_level = None
        else:
            effects.connection.autocommit = True
        effects.connection.cursor().execute("BEGIN")
        assert done.add(GivenJob(4))
        with pytest.raises(laminar.ConfigError, match="use `add`"), done.first(GivenJob(5)):
            pass
        effects.connection.cursor().execute("ROLLBACK")


def test_rows_below_the_floor_are_deleted_and_stay_done(effects: Effects) -> None:
    """The floor rises at once by many records, so that not each job deletes."""
    for offset in range(5):
        effects.work(GivenJob(offset))
    assert effects.work(GivenJob(FORGET_EVERY - 2, floor=FORGET_EVERY - 2))
    assert 6 == effects.count()

    assert effects.work(GivenJob(FORGET_EVERY, floor=FORGET_EVERY))

    assert 1 == effects.count()
    assert not effects.work(GivenJob(4))
    assert not effects.work(GivenJob(FORGET_EVERY - 1, floor=0))  # a channel that was moved back
    assert effects.work(GivenJob(FORGET_EVERY + 1, floor=0))
    assert effects.work(GivenJob(4, partition=1))
    assert effects.work(GivenJob(4, channel_id=8))


def test_two_consumers_of_one_job_at_a_time(postgres: Application) -> None:
    """The first outlived its time. The second waits for what becomes of its transaction."""
    effects = Effects(postgres)
    fresh: dict[str, bool] = {}

    def second(name: str) -> None:
        with postgres.opened() as connection, Done(connection).first(GivenJob(3)) as is_fresh:
            fresh[name] = is_fresh
            if is_fresh:
                effects.effect(connection, 3)

    for name, ends in (("fresh", effects.connection.rollback), ("done", effects.connection.commit)):
        postgres.run("DELETE FROM done;\nDELETE FROM effects;\n")
        assert Done(effects.connection).add(GivenJob(3))
        effects.effect(effects.connection, 3)
        thread = threading.Thread(target=second, args=(name,), daemon=True)
        thread.start()
        until_one_waits(postgres)
        ends()
        thread.join(PATIENCE_S)
        assert [3] == effects.places()

    effects.connection.close()
    assert {"fresh": True, "done": False} == fresh


def until_one_waits(application: Application) -> None:
    """Until a transaction of this database waits for another."""
    waits = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    while application.rows(waits) == [(0,)]:
        time.sleep(0.02)


def test_a_consumer_that_slept_while_its_job_was_done_and_forgotten(postgres: Application) -> None:
    """Its insert waits for the deletion of the row, and then succeeds: the floor says what it was."""
    effects = Effects(postgres)
    effects.work(GivenJob(3))
    fresh: list[bool] = []

    def late() -> None:
        with postgres.opened() as connection, Done(connection).first(GivenJob(3)) as is_fresh:
            fresh.append(is_fresh)

    assert Done(effects.connection).add(GivenJob(FORGET_EVERY, floor=FORGET_EVERY))
    thread = threading.Thread(target=late, daemon=True)
    thread.start()
    until_one_waits(postgres)
    effects.connection.commit()
    thread.join(PATIENCE_S)
    effects.connection.close()

    assert [False] == fresh


def test_forgetting_makes_no_consumer_wait(postgres: Application) -> None:
    """One deletes in a transaction that takes long; the next, whose floor is as high, goes on."""
    effects = Effects(postgres)
    effects.work(GivenJob(FORGET_EVERY, floor=FORGET_EVERY))
    assert Done(effects.connection).add(GivenJob(2 * FORGET_EVERY, floor=2 * FORGET_EVERY))

    with postgres.opened() as connection:
        connection.cursor().execute("SET lock_timeout = '5s'")
        with Done(connection).first(GivenJob(2 * FORGET_EVERY + 1, floor=2 * FORGET_EVERY)) as fresh:
            assert fresh
    effects.connection.commit()
    effects.connection.close()


def test_repeatable_read_is_refused(postgres: Application) -> None:
    """Its snapshot may be older than the deletion of the row that its insert waited for."""
    effects = Effects(postgres)
    effects.connection.cursor().execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    with pytest.raises(laminar.ConfigError, match="repeatable read"):
        Done(effects.connection).add(GivenJob(3))
    effects.connection.rollback()
    effects.connection.cursor().execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    assert Done(effects.connection).add(GivenJob(3))
    effects.connection.rollback()
    effects.connection.close()


def test_jobs_of_a_channel_that_is_made_again_are_fresh(effects: Effects, topic: Topic) -> None:
    """Also for a program that opened the channel before; offsets alone would take them for done."""
    topic.append(b"one")
    channel = topic.channel("workers", exist_ok=True)
    (job,) = channel.receive_batch(wait=20)
    assert effects.work(job)
    job.ack()
    first = job.channel_id
    topic.delete_channel("workers")
    assert topic.channel("workers", exist_ok=True).name == "workers"
    (job,) = channel.receive_batch(wait=20)

    assert job.channel_id == topic.describe_channel("workers").id > first
    assert effects.work(job)
    job.ack()
    assert [0, 0] == effects.places()


def test_a_job_that_a_channel_gives_again(effects: Effects, topic: Topic) -> None:
    topic.append(b"one")
    channel = topic.channel("workers", exist_ok=True)
    for expected in (True, False):
        (job,) = channel.receive_batch(wait=20)
        assert expected == effects.work(job)
        job.release()
    channel.seek("earliest")

    assert [0] == effects.places()


def test_the_tables_are_named_by_the_caller(sqlite: Application) -> None:
    sqlite.run(schema("billing_done"))
    with pytest.raises(laminar.ConfigError, match="no name of a table"):
        schema("done; DROP TABLE done")
    connection = sqlite3.connect(sqlite.place)
    with Done(connection, "billing_done").first(GivenJob(1)) as fresh:
        assert fresh
    connection.close()
