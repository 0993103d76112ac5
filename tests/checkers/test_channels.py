"""A sound history of a channel has nothing wrong; each anomaly, put in by hand, is named, and it alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.checkers.channels import KINDS, Found, Heard, Holding, Place, Promise, Word, check_channel, load

S = 1_000_000
TIMEOUT_S = 4


def given(
    offset: int, delivery: int, attempt: int, at_s: float, verb: str, outcome: str = "done", who: str = "c-1"
) -> Holding:
    """One record, asked for at a second, got 0.1 s later; 0.2 s later something is said, and answered."""
    at_us = int(at_s * S)
    words = [Word(verb, at_us + 2 * S // 10, outcome, at_us + 3 * S // 10)] if verb else []  # type: ignore[arg-type]
    return Holding(
        who, (0, offset), delivery, attempt, "k", f"k {offset}", "bulk", at_us, at_us + S // 10, words
    )


@dataclass
class Seen:
    """Five records of one key, one after the other; `c-1` is killed at second 20."""

    holdings: dict[str, Holding] = field(
        default_factory=lambda: {
            "acked": given(0, 10, 1, 1, "ack"),
            "released": given(1, 20, 1, 2, "release"),
            "nacked": given(1, 30, 1, 3, "nack"),
            "acked at last": given(1, 40, 2, 4, "ack"),
            "poisoned": given(2, 50, 1, 5, "nack"),
            "poisoned again": given(2, 60, 2, 6, "nack"),
            "killed": given(3, 70, 1, 19.8, ""),
            "after the kill": given(3, 80, 2, 24, "ack", who="c-2"),
            # One attempt of it was not heard of: the answer with it was lost.
            "last": given(4, 90, 2, 40, "ack", who="c-2"),
        }
    )
    dead: dict[Place, int] = field(default_factory=lambda: {(0, 2): 2})
    unheard: list[tuple[int, int]] = field(default_factory=lambda: [(35 * S, 36 * S)])
    max_attempts: int = 2
    tags: frozenset[str] = frozenset({"bulk"})

    def found(self) -> Found:
        return check_channel(
            Promise(
                {(0, offset): ("k", f"k {offset}", "bulk") for offset in range(5)},
                timeout_ms=TIMEOUT_S * 1_000,
                max_attempts=self.max_attempts,
                ordered=True,
                tags=self.tags,
                poisoned=frozenset({(0, 2)}),
            ),
            Heard(list(self.holdings.values()), self.unheard),
            dead=self.dead,
            ends_us={"c-1": 20 * S},
            faults=[(20 * S, 20 * S)],
        )

    def change(self, name: str, **changed: Any) -> None:
        for what, value in changed.items():
            setattr(self.holdings[name], what, value)


def test_a_sound_history_has_nothing_wrong() -> None:
    """What was released, refused, killed, poisoned or not heard of is as promised."""
    found = Seen().found()

    assert found.sentences == []
    assert (found.done, found.dead, found.deliveries) == (4, 1, 9)
    assert (found.redelivered, found.in_flight, found.unseen) == (1, 1, 1)


def never_given(seen: Seen) -> None:
    del seen.holdings["acked"]


def never_done(seen: Seen) -> None:
    seen.change("acked", words=[])


def late_and_never_again(seen: Seen) -> None:
    seen.holdings["acked"].words[0].outcome = "late"


def given_after_done(seen: Seen) -> None:
    seen.holdings["x"] = given(4, 95, 2, 50, "release", who="c-1")
    seen.holdings["last"].words.insert(0, Word("release", 40 * S + 1, "unknown"))


def two_consumers(seen: Seen) -> None:
    seen.holdings["x"] = given(0, 10, 1, 1, "", who="c-2")


def before_its_time_is_over(seen: Seen) -> None:
    seen.change("after the kill", asked_us=20 * S, got_us=21 * S)


def although_extended(seen: Seen) -> None:
    seen.holdings["killed"].words.append(Word("extend", 21 * S, "done", 21 * S + 1))


def key_given_by_the_log(seen: Seen) -> None:
    seen.change("last", delivery=75)


def key_given_by_the_clock(seen: Seen) -> None:
    seen.holdings["acked at last"].words[0].asked_us = 6 * S


def key_of_a_dead_one_given(seen: Seen) -> None:
    seen.holdings["poisoned again"].words[0].asked_us = 21 * S
    seen.change("killed", asked_us=6 * S + 1, got_us=6 * S + 2)


def attempts_stand_still(seen: Seen) -> None:
    seen.change("acked at last", attempt=1)


def attempts_fall(seen: Seen) -> None:
    seen.change("released", attempt=2)


def a_release_counts(seen: Seen) -> None:
    seen.change("nacked", attempt=2)
    seen.change("acked at last", attempt=3)
    seen.max_attempts = 3
    seen.dead = {(0, 2): 3}
    # One of them was not heard of, as an answer may have been lost.
    seen.unheard.append((6 * S, 7 * S))


def attempts_beyond_the_last(seen: Seen) -> None:
    seen.change("last", attempt=3)


def attempts_of_the_dead(seen: Seen) -> None:
    seen.dead = {(0, 2): 1}
    del seen.holdings["poisoned again"]


def poisoned_and_not_dead(seen: Seen) -> None:
    seen.dead = {}


def acknowledged_and_dead(seen: Seen) -> None:
    seen.holdings["poisoned again"].words[0].verb = "ack"


def another_tag(seen: Seen) -> None:
    seen.tags = frozenset({"mail"})
    seen.holdings = {"acked": seen.holdings["acked"]}
    seen.dead = {(0, 2): 2}


def another_value(seen: Seen) -> None:
    seen.change("last", value="k 9")


def nothing_had_failed(seen: Seen) -> None:
    seen.change("killed", asked_us=8 * S, got_us=8 * S + 1)
    seen.change("after the kill", asked_us=18 * S, got_us=18 * S + 1)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (never_given, "lost"),
        (never_done, "lost"),
        (late_and_never_again, "lost"),
        (given_after_done, "after done"),
        (two_consumers, "twice"),
        (before_its_time_is_over, "early"),
        (although_extended, "early"),
        (key_given_by_the_log, "reordered"),
        (key_given_by_the_clock, "reordered"),
        (key_of_a_dead_one_given, "reordered"),
        (attempts_stand_still, "attempts"),
        (attempts_fall, "attempts"),
        (a_release_counts, "attempts"),
        (attempts_beyond_the_last, "attempts"),
        (attempts_of_the_dead, "dead"),
        (poisoned_and_not_dead, "dead"),
        (acknowledged_and_dead, "dead"),
        (another_tag, "filtered"),
        (another_value, "other"),
        (nothing_had_failed, "unexplained"),
    ],
)
def test_an_anomaly_is_named(change: Callable[[Seen], None], kind: str) -> None:
    """And no other one."""
    seen = Seen()
    change(seen)

    found = seen.found()

    assert {sentence.partition(":")[0] for sentence in found.sentences} == {kind}, found.sentences
    assert kind in KINDS and found.count(kind) == len(found.sentences)


def test_a_late_nack_may_be_done_while_something_failed() -> None:
    """A node sent it a second time, as the leader that had carried it out died. Otherwise it was refused."""
    repeated, refused = Seen(), Seen()
    repeated.holdings["x"] = given(3, 75, 1, 20.5, "nack", "late", who="c-2")
    repeated.change("killed", attempt=1, asked_us=S * 14, got_us=S * 14)
    repeated.change("after the kill", attempt=3, asked_us=22 * S, got_us=22 * S)
    repeated.holdings["x"].attempt = 2
    repeated.max_attempts = 3
    repeated.dead = {(0, 2): 3}
    repeated.unheard.append((6 * S, 7 * S))
    refused.holdings["nacked"].words[0].outcome = "late"

    assert repeated.found().sentences == []
    assert {each.partition(":")[0] for each in refused.found().sentences} == {"early", "unexplained"}


def test_what_consumers_wrote_is_read(tmp_path: Path) -> None:
    """A range of tokens, late and unknown ones, an answer that never came, a line that a kill cut off."""

    def line(**told: Any) -> str:
        return json.dumps(told) + "\n"

    jobs = [[0, offset, 5, 1, "k", f"k {offset}", "bulk"] for offset in (3, 4, 5)]
    said: Mapping[str, Any] = {"ack": ["0:3-5:5"], "nack": [], "release": []}
    (tmp_path / "c-1.jsonl").write_text(
        line(what="asks", number=1, at=1)
        + line(what="got", number=1, at=2, jobs=jobs)
        + line(what="says", number=2, at=3, said=said)
        + line(what="failed", number=2, at=4, outcome="unknown", error="504 outcome_unknown")
        + line(what="says", number=3, at=5, said=said)
        + line(what="told", number=3, at=6, late=["0:4:5"], unknown=["0:5:5"])
        + line(what="asks", number=4, at=7)
        + line(what="got", number=4, at=8, jobs=jobs)[:-9]
    )

    heard = load([tmp_path / "c-1.jsonl"], {"c-1": 9})

    outcomes = {each.place: [word.outcome for word in each.words] for each in heard.holdings}
    assert outcomes == {
        (0, 3): ["unknown", "done"],
        (0, 4): ["unknown", "late"],
        (0, 5): ["unknown", "unknown"],
    }
    assert heard.unheard == [(7, 9)]
    assert heard.requests["acks: 504 outcome_unknown"] == 1
