"""A history that is sound has no violations; each anomaly, put into it by hand, is named, and it alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkers import Fault, History, Operation, Violation, check_linear, check_operations

FOLLOWER = "reader-1"


def append(number: int, *, key: str = "a", outcome: str = "ok", **changes: object) -> Operation:
    """The `number`-th append to the partition, 10 us after the one before it, answered 5 us later."""
    given = {
        "process": "producer-1",
        "start_us": number * 10,
        "end_us": number * 10 + 5,
        "outcome": outcome,
        "offset": number if outcome == "ok" else None,
    } | changes
    return Operation(kind="append", topic="t", partition=0, key=key, number=number, **given)  # type: ignore[arg-type]


def poll(
    *values: tuple[int, str], kind: str = "poll", process: str = FOLLOWER, at_us: int = 900
) -> Operation:
    return Operation(
        kind=kind,  # type: ignore[arg-type]
        process=process,
        start_us=at_us,
        end_us=at_us + 5,
        topic="t",
        partition=0,
        values=list(values),
    )


def read(end_offset: int, *, at_us: int, process: str = "asker", node: str = "node-1") -> Operation:
    return Operation(
        kind="read",
        process=process,
        start_us=at_us,
        end_us=at_us + 2,
        topic="t",
        partition=0,
        end_offset=end_offset,
        node=node,
    )


def sound() -> list[Operation]:
    """Six appends, one of them without an answer and there all the same; polls, reads, the final reading."""
    appends = [append(number) for number in range(6)]
    appends[3] = append(3, outcome="unknown", end_us=None)
    values = [(number, f"a {number}") for number in range(6)]
    return [
        *appends,
        read(1, at_us=6),
        read(6, at_us=70),
        poll(*values[:2], at_us=30),
        poll(*values[2:]),
        poll(*values, kind="final", process="final", at_us=990),
    ]


def check(history: list[Operation]) -> list[Violation]:
    return check_operations(history, followers=[FOLLOWER]) + check_linear(history)


def test_a_sound_history_has_no_anomaly() -> None:
    """An append that was never answered may be there or not."""
    assert [] == check(sound())
    absent = [append(0, outcome="unknown", end_us=None), poll(kind="final", process="final")]
    assert [] == check(absent)


def lost(history: list[Operation]) -> None:
    for place in (-1, -2):
        history[place].values = history[place].values[:-1]


def read_and_lost(history: list[Operation]) -> None:
    """Nobody was told of it, but somebody has read it."""
    history[5] = append(5, outcome="unknown", end_us=None)
    history[-1].values = history[-1].values[:-1]


def duplicate(history: list[Operation]) -> None:
    for place in (-1, -2):
        history[place].values = [*history[place].values, (6, "a 5")]


def inconsistent_offsets(history: list[Operation]) -> None:
    history.append(poll((2, "b 0"), process="other"))
    history.append(append(0, key="b", outcome="unknown", end_us=None))


def moved(history: list[Operation]) -> None:
    history[5] = append(5, offset=6)
    del history[7]


def reordered(history: list[Operation]) -> None:
    """Sent at once, so that real time allows it; the key's order does not."""
    history[4] = append(4, offset=5, start_us=40)
    history[5] = append(5, offset=4, start_us=40)
    for place in (-1, -2):
        history[place].values = [*history[place].values[:-2], (4, "a 5"), (5, "a 4")]


def goes_back(history: list[Operation]) -> None:
    history.append(poll((1, "a 1"), at_us=920))


def skips(history: list[Operation]) -> None:
    history.append(poll((0, "a 0"), (2, "a 2"), process="other"))


def unseen(history: list[Operation]) -> None:
    history[-2].values = history[-2].values[:-1]


def never_sent(history: list[Operation]) -> None:
    for place in (-1, -2):
        history[place].values = [*history[place].values, (6, "z 9")]


def refused_and_there(history: list[Operation]) -> None:
    history[3] = append(3, outcome="fail")


def against_real_time(history: list[Operation]) -> None:
    """The fifth was begun after the last was acknowledged."""
    history[4] = append(4, start_us=58, end_us=60)


def stale_read(history: list[Operation]) -> None:
    history.append(read(5, at_us=56, process="asker of the deposed"))


def stale_after_another(history: list[Operation]) -> None:
    """The fourth has no receipt: only the other read tells that it was there."""
    history[5] = append(5, outcome="unknown", end_us=None)
    history[4] = append(4, outcome="unknown", end_us=None)
    history.append(read(3, at_us=75, process="asker of the deposed"))


def read_from_the_future(history: list[Operation]) -> None:
    history.append(read(5, at_us=36))
    history[-1].end_us = 37


ANOMALIES: list[tuple[Callable[[list[Operation]], None], set[str]]] = [
    (lost, {"lost"}),
    (read_and_lost, {"lost"}),
    (duplicate, {"duplicate", "moved"}),
    (inconsistent_offsets, {"conflict"}),
    (moved, {"moved", "duplicate"}),
    (reordered, {"reordered"}),
    (goes_back, {"offsets"}),
    (skips, {"skipped"}),
    (unseen, {"unseen"}),
    (never_sent, {"unknown"}),
    (refused_and_there, {"aborted"}),
    (against_real_time, {"real_time"}),
    (stale_read, {"stale_read"}),
    (stale_after_another, {"stale_read"}),
    (read_from_the_future, {"future_read"}),
]


@pytest.mark.parametrize(("damage", "kinds"), ANOMALIES, ids=lambda value: getattr(value, "__name__", ""))
def test_each_anomaly_is_named(damage: Callable[[list[Operation]], None], kinds: set[str]) -> None:
    """Nothing else is: a checker that cries at everything would pass too."""
    history = sound()
    damage(history)

    found = check(history)

    assert kinds == {each.kind for each in found}, "\n".join(map(str, found))
    assert all(str(each).startswith(f"{each.kind}: t/0: ") for each in found)


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A line each, operations and faults."""
    history = History(tmp_path / "history.jsonl")
    for operation in sound():
        history.add(operation)
    history.add(Fault(what="kill", nodes=["node-1"], start_us=1, end_us=2))
    history.close()

    read_again = History.load(tmp_path / "history.jsonl")

    assert (history.operations, history.faults) == (read_again.operations, read_again.faults)
    assert 12 == len((tmp_path / "history.jsonl").read_bytes().splitlines())


def test_a_long_history_is_checked_in_time() -> None:
    """O(n log n): a quadratic checker would take minutes for this one."""
    appends = [append(number, key=f"k{number % 7}") for number in range(50_000)]
    reads = [read(number + 1, at_us=number * 10 + 6) for number in range(0, 50_000, 2)]

    assert [] == check_linear([*appends, *reads])
