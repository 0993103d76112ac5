"""Rows that are committed are in the topic once, in the relay's order; others never."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.outbox import BadRow, Relay
from laminar.outbox.databases import Database
from laminar.outbox.table import OutboxTable, TakenOver
from tests.client.members import until
from tests.outbox.applications import Application

Topic = laminar.Topic[bytes]


def relay_of(application: Application, topic: Topic, **more: object) -> Relay:
    return Relay(application.connect, "outbox", topic, "relay", poll=0.02, **more)  # type: ignore[arg-type]


def send(application: Application, topic: Topic, **more: object) -> int:
    return relay_of(application, topic, **more).run(until_empty=True)


@contextmanager
def working(*relays: Relay) -> Iterator[list[int | laminar.Error]]:
    """Relays that run in threads of their own, and end with the block; what each returned or raised."""
    ended: list[int | laminar.Error] = []

    def run(relay: Relay) -> None:
        try:
            ended.append(relay.run())
        except laminar.Error as error:
            ended.append(error)

    threads = [threading.Thread(target=run, args=(relay,), daemon=True) for relay in relays]
    for thread in threads:
        thread.start()
    try:
        yield ended
    finally:
        for relay in relays:
            relay.stop()
        for thread in threads:
            thread.join()


def values(topic: Topic) -> list[bytes]:
    return [record.value for record in topic.read()]


def table_of(application: Application) -> OutboxTable:
    return OutboxTable(Database(application.connect()), "outbox")


def test_committed_rows_are_sent_with_all_their_columns(application: Application, topic: Topic) -> None:
    with application.opened() as connection:
        application.insert(
            connection,
            b"one",
            key="alice",
            tag="new",
            headers={"by": "Zoë"},
            timestamp_ms=17,
            trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
        )
        application.insert(connection, b"\x00\xff")

    assert 2 == send(application, topic)

    first, second = topic.read()
    assert (b"one", b"alice", "new", {"by": "Zoë".encode()}) == (
        first.value,
        first.key,
        first.tag,
        dict(first.headers),
    )
    assert (17, "4bf92f3577b34da6a3ce929d0e0e4736") == (first.timestamp, first.trace_id)
    assert second.trace_id is None
    assert (b"\x00\xff", None, None) == (second.value, second.key, second.tag)
    assert abs(second.timestamp - time.time() * 1000) < 60_000  # its default: when it was inserted
    assert [] == application.rows("SELECT id FROM outbox")
    assert 0 == send(application, topic)


def test_a_row_with_a_time_is_read_when_it_is_due(application: Application, topic: Topic) -> None:
    """It is deleted when the topic has it; one whose time has passed is there at once."""
    due_ms = time.time_ns() // 1_000_000 + 3_600_000
    with application.opened() as connection:
        application.insert(connection, b"later", deliver_at_ms=due_ms)
        application.insert(connection, b"now", deliver_at_ms=17)
        application.insert(connection, b"plain")

    assert 3 == send(application, topic)

    assert [] == application.rows("SELECT id FROM outbox")
    assert [b"now", b"plain"] == values(topic)
    (later,) = topic.list_delayed()
    assert due_ms == round(later.deliver_at.timestamp() * 1000)
    topic.move_delayed(later.id, deliver_at="now")
    assert b"later" == next(iter(topic.read({0: 2}, follow=True))).value


def test_what_is_rolled_back_is_never_sent(application: Application, topic: Topic) -> None:
    application.add(b"before")
    with pytest.raises(ZeroDivisionError), application.opened() as connection:
        application.insert(connection, b"never")
        raise ZeroDivisionError
    application.add(b"behind")

    assert 2 == send(application, topic)

    assert [b"before", b"behind"] == values(topic)


def test_a_row_that_is_committed_late_is_sent_late(postgres: Application, topic: Topic) -> None:
    """Its id is lower than those that were sent; rows are not deleted by a range of ids."""
    with postgres.opened() as slow:
        postgres.insert(slow, b"low id, late")
        postgres.add(b"high id")
        table = table_of(postgres)
        claim = table.begin("relay", topic.name)
        claim = table.next_claim(claim, max_rows=10, max_bytes=1000)
        assert [2] == claim.left
    claim = table.next_claim(claim, max_rows=0, max_bytes=1000)
    table.close()
    assert [(b"low id, late",)] == [(bytes(row[0]),) for row in postgres.rows("SELECT value FROM outbox")]

    assert 1 == send(postgres, topic)
    assert [b"low id, late"] == values(topic)


def test_claims_are_bounded_by_rows_and_by_bytes(application: Application, topic: Topic) -> None:
    application.add(*[b"x" * 100] * 7)
    table = table_of(application)
    claim = table.begin("relay", topic.name)
    sizes = []
    while (claim := table.next_claim(claim, max_rows=3, max_bytes=250)).ids:
        sizes.append(len(claim.ids))
    table.close()

    assert [2, 2, 2, 1] == sizes
    assert 7 == claim.last


def test_only_the_run_that_began_last_changes_anything(application: Application, topic: Topic) -> None:
    """Whatever has become of its lock: what the older one does then is rolled back whole."""
    application.add(b"one")
    first, second = table_of(application), table_of(application)
    claim = first.next_claim(first.begin("relay", topic.name), max_rows=10, max_bytes=1000)
    assert claim == second.begin("relay", topic.name)

    with pytest.raises(TakenOver):
        first.next_claim(claim, max_rows=10, max_bytes=1000)

    assert [(1,)] == application.rows("SELECT count(*) FROM outbox")
    second.close()
    first.close()


def test_of_two_relays_one_works_and_the_other_waits(application: Application, topic: Topic) -> None:
    relays = [relay_of(application, topic) for _ in range(2)]
    holder = table_of(application)
    assert holder.try_lock()
    with working(*relays) as counts:
        application.add(b"one", b"two")
        another = table_of(application)
        assert not another.try_lock()
        another.close()
        assert [] == values(topic)
        holder.close()
        with topic.read(follow=True) as reader:
            records = iter(reader)
            assert [b"one", b"two"] == [next(records).value for _ in range(2)]

    assert counts in ([0, 2], [2, 0])
    assert [b"one", b"two"] == values(topic)


def test_a_connection_that_is_cut_is_made_again(postgres: Application, topic: Topic) -> None:
    relay = relay_of(postgres, topic)
    with working(relay) as ended, topic.read(follow=True) as reader:
        records = iter(reader)
        for number in range(5):
            postgres.add(b"%d" % number)
            assert b"%d" % number == next(records).value
            postgres.rows(
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
                " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )

    assert [int] == [type(each) for each in ended]
    assert 0 == send(postgres, topic)
    assert [b"0", b"1", b"2", b"3", b"4"] == values(topic)


# -- rows that can be no records -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"value": b"x" * (8 << 20) + b"y"}, "too large|over the limit"),
        ({"value": b"x", "tag": "t" * 40_000}, "tag"),
        ({"value": b"x", "headers": {"n": 17}}, "headers"),
    ],
    ids=["value", "tag", "headers"],
)
def test_a_bad_row_is_named_and_what_follows_waits(
    application: Application, topic: Topic, columns: dict[str, Any], what: str
) -> None:
    """Rows before it are sent. When it is mended, it and the rest are sent, all once."""
    if application.kind == "postgresql":
        application.run("ALTER TABLE outbox DROP CONSTRAINT outbox_value_check;\n")
    else:
        text = application.rows("SELECT sql FROM sqlite_master WHERE name = 'outbox'")[0][0]
        bare = text.replace("CHECK (length(CAST(value AS blob)) <= 8388608)", "")
        application.run(f"DROP TABLE outbox;\n{bare};\n")
    application.add(b"one", b"two")
    application.add(columns["value"], **{name: cell for name, cell in columns.items() if name != "value"})
    application.add(b"four")

    for _ in range(2):
        with pytest.raises(BadRow, match=what) as caught:
            send(application, topic)
        assert ("outbox", 3) == (caught.value.table, caught.value.row)
        assert "row 3 of outbox" in str(caught.value)
        assert [b"one", b"two"] == values(topic)
        assert [(3,), (4,)] == application.rows("SELECT id FROM outbox ORDER BY id")

    application.run("UPDATE outbox SET value = 'three', tag = NULL, headers = NULL WHERE id = 3;\n")
    assert 2 == send(application, topic)
    assert [b"one", b"two", b"three", b"four"] == values(topic)


def test_a_row_that_is_deleted_while_it_is_claimed_is_left_out(
    application: Application, topic: Topic
) -> None:
    application.add(b"one", b"two")
    table = table_of(application)
    table.next_claim(table.begin("relay", topic.name), max_rows=10, max_bytes=1000)
    table.close()
    application.run("DELETE FROM outbox WHERE id = 2;\n")

    send(application, topic)
    application.add(b"three")
    send(application, topic)

    assert [b"one", b"three"] == values(topic)


# -- databases that know too little -----------------------------------------------------------------


def test_a_database_that_was_set_back_is_noticed(sqlite: Application, topic: Topic) -> None:
    """Else its new rows would get numbers that the topic has, and be taken for sent."""
    sqlite.add(b"one")
    send(sqlite, topic)
    with sqlite3.connect(sqlite.place) as source, sqlite3.connect(f"{sqlite.place}.old") as copy:
        source.backup(copy)
    source.close()
    copy.close()
    sqlite.add(b"two", b"three")
    send(sqlite, topic)
    for file in ("-wal", "-shm"):
        Path(sqlite.place + file).unlink(missing_ok=True)
    shutil.move(f"{sqlite.place}.old", sqlite.place)
    sqlite.add(b"four", b"five", b"six")

    with pytest.raises(laminar.Error, match="set back") as caught:
        send(sqlite, topic)
    assert ("set_back", 1, 3) == (caught.value.code, caught.value.value, caught.value.limit)
    assert [b"one", b"two", b"three"] == values(topic)

    assert 3 == send(sqlite, topic, resend=True)
    assert [b"one", b"two", b"three", b"four", b"five", b"six"] == values(topic)
    sqlite.add(b"seven")
    assert 1 == send(sqlite, topic)


def test_a_copy_of_a_database_is_noticed(sqlite: Application, topic: Topic, client: laminar.Client) -> None:
    """Both number their rows alike. The first one is refused, and does not go on by itself."""
    sqlite.add(b"one")
    send(sqlite, topic)
    with sqlite3.connect(sqlite.place) as source, sqlite3.connect(f"{sqlite.place}.copy") as copy:
        source.backup(copy)
    source.close()
    copy.close()
    other = Application("sqlite3", f"{sqlite.place}.copy")

    with topic.read(follow=True) as reader:
        records = iter(reader)
        next(records)
        sqlite.add(b"two")
        with working(relay_of(sqlite, topic, max_rows=3)) as ended:
            assert b"two" == next(records).value
            with pytest.raises(laminar.Error) as caught:
                send(other, topic)
            assert "set_back" == caught.value.code  # the copy was behind
            other.add(b"of the copy")
            assert 1 == send(other, topic, resend=True)
            sqlite.add(b"three", b"four")
            until(lambda: bool(ended), "the first one is refused")

    (fenced,) = ended
    assert isinstance(fenced, laminar.Fenced)
    assert "copy" in str(fenced)
    with pytest.raises(laminar.Error) as caught:
        send(sqlite, topic)
    assert "in_doubt" == caught.value.code
    assert [b"one", b"two", b"of the copy"] == values(topic)
    assert 2 == send(sqlite, topic, resend=True)
    assert [b"three", b"four"] == values(topic)[3:]


def test_rows_in_doubt_are_not_sent_by_themselves(application: Application, topic: Topic) -> None:
    """A claim of six days: the partitions may have forgotten what they have of it."""
    application.add(b"one")
    table = table_of(application)
    table.next_claim(table.begin("relay", topic.name), max_rows=10, max_bytes=1000)
    table.close()
    application.run("UPDATE outbox_relay SET claimed_ms = claimed_ms - 518400001;\n")

    with pytest.raises(laminar.Error, match="may be in the topic already") as caught:
        send(application, topic)
    assert "in_doubt" == caught.value.code
    assert [] == values(topic)

    assert 1 == send(application, topic, resend=True)
    assert [b"one"] == values(topic)


def test_outboxes_whose_relays_have_the_same_name_do_not_meet(application: Application, topic: Topic) -> None:
    """Tables that are made again begin at 1, under another producer."""
    application.add(b"one", b"two")
    send(application, topic)
    application.run("DROP TABLE outbox;\nDROP TABLE outbox_relay;\n")
    application.make_tables()
    application.add(b"three")

    assert 1 == send(application, topic)
    assert [b"one", b"two", b"three"] == values(topic)


def test_claimed_rows_go_to_their_topic_before_another_one(
    application: Application, topic: Topic, client: laminar.Client
) -> None:
    application.add(b"one")
    table = table_of(application)
    table.next_claim(table.begin("relay", topic.name), max_rows=10, max_bytes=1000)
    table.close()
    another = client.create_topic(f"{topic.name}-b", partitions=1)

    with pytest.raises(laminar.ConfigError, match=topic.name):
        send(application, another)
    send(application, topic)
    application.add(b"two")
    send(application, another)

    assert ([b"one"], [b"two"]) == (values(topic), values(another))


# -- what is wrong from the start -------------------------------------------------------------------


def test_mistakes_are_raised_at_once(sqlite: Application, topic: Topic, client: laminar.Client) -> None:
    with pytest.raises(laminar.NotFound, match="no-such-topic"):
        send(sqlite, client.topic("no-such-topic"))
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        Relay(sqlite.connect, "absent", topic, "relay").run(until_empty=True)
    with pytest.raises(laminar.ConfigError, match="no name of a table"):
        Relay(sqlite.connect, "a; DROP TABLE outbox", topic, "relay").run(until_empty=True)
    with pytest.raises(laminar.ConfigError, match="not understood"):
        Relay(lambda: threading.Lock(), "outbox", topic, "relay").run(until_empty=True)
    with pytest.raises(laminar.ConfigError, match="codec"):
        Relay(sqlite.connect, "outbox", client.topic("x", laminar.json()), "relay")
    sqlite.run("DELETE FROM outbox_relay;\n")
    with pytest.raises(laminar.ConfigError, match="schema"):
        send(sqlite, topic)


def test_a_connection_may_have_rows_of_its_own_kind(sqlite: Application, topic: Topic) -> None:
    """As an application sets it; the relay's own are tuples."""
    sqlite.add(b"one", headers={"a": "b"})

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(sqlite.place)
        connection.row_factory = lambda cursor, row: {"never": "a tuple"}
        return connection

    assert 1 == Relay(connect, "outbox", topic, "relay").run(until_empty=True)
