"""What consumers of a channel were given, against what channels promise (`docs/channels.md`).

Consumers write lines, each before they go on (`tests.cluster.faults.consumer`); `load` makes a `Holding` of
each record that one was given. Its delivery is the index of an entry of the partition's log. So which of two
deliveries came first needs no clock. Where a rule is about time, the clock is that of the machine on which
all consumers ran, in microseconds, and the instants are chosen so that no delay makes a sound history wrong.

An answer may be lost, or a consumer killed before it wrote it down. So a record may have been given out
without a holding here. `unheard` are the times in which that can be: a rule that counts says so.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from laminar.wire.channels import parse_token

Place = tuple[int, int]
Span = tuple[int, int]
# How long what was wrong may go on after a fault: until there are leaders, and all that was out is overdue.
AFTER_US = 10_000_000
KINDS = (
    "lost",
    "after done",
    "twice",
    "early",
    "reordered",
    "attempts",
    "dead",
    "filtered",
    "other",
    "unexplained",
)


@dataclass(slots=True)
class Word:
    """What a consumer said of a holding, and what it was answered."""

    verb: Literal["ack", "nack", "release", "extend"]
    asked_us: int
    outcome: Literal["done", "late", "not_applied", "unknown"] = "unknown"
    answered_us: int | None = None

    @property
    def may_be_done(self) -> bool:
        return self.outcome in ("done", "unknown")


@dataclass(slots=True)
class Holding:
    """A record that a consumer was given: when it asked, when it got it, and what it said."""

    consumer: str
    place: Place
    delivery: int
    attempt: int
    key: str
    value: str
    tag: str
    asked_us: int
    got_us: int
    words: list[Word] = field(default_factory=list)

    def said(self, *verbs: str) -> list[Word]:
        """Return what was said with these verbs, and not refused."""
        return [word for word in self.words if word.verb in verbs and word.may_be_done]

    def held_until_us(self, timeout_us: int) -> int:
        """Return before when its time cannot be over."""
        since = [word.asked_us for word in self.words if word.verb == "extend" and word.outcome == "done"]
        return max(since, default=self.asked_us) + timeout_us

    @property
    def ended_us(self) -> int | None:
        """When its consumer knew what became of it; None: never."""
        known = (
            word.answered_us
            for word in self.words
            if word.verb != "extend" and word.outcome in ("done", "late")
        )
        return min((at for at in known if at is not None), default=None)


@dataclass(slots=True)
class Heard:
    """All consumers of one channel. `unheard`: spans in which records may have been given out unseen."""

    holdings: list[Holding] = field(default_factory=list)
    unheard: list[Span] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Promise:
    """A channel as it was made; and (key, value, tag) of all that was appended, by place."""

    appended: Mapping[Place, tuple[str, str, str]]
    timeout_ms: int
    max_attempts: int
    ordered: bool = False
    tags: frozenset[str] = frozenset()
    # Places of the records that no consumer ever acknowledged.
    poisoned: frozenset[Place] = frozenset()

    def wants(self, tag: str) -> bool:
        """Return whether its filter takes a tag."""
        return not self.tags or tag in self.tags


@dataclass(slots=True)
class Found:
    """Sentences, each of which begins with one of `KINDS`, and figures."""

    sentences: list[str] = field(default_factory=list)
    records: int = 0
    done: int = 0
    dead: int = 0
    deliveries: int = 0
    # Given again though its consumer had not given it back; and all that could be, while something failed.
    redelivered: int = 0
    in_flight: int = 0
    # Attempts that no consumer heard of.
    unseen: int = 0

    def count(self, kind: str) -> int:
        """Return how many sentences are of a kind."""
        return sum(sentence.startswith(f"{kind}:") for sentence in self.sentences)


def load(paths: Iterable[Path], ends_us: Mapping[str, int]) -> Heard:
    """Return what the files say; the name of each is its consumer's. `ends_us`: when it was killed."""
    heard = Heard()
    for path in paths:
        _load(heard, path, ends_us.get(path.stem))
    heard.unheard.sort()
    return heard


def _load(heard: Heard, path: Path, end_us: int | None) -> None:
    mine: dict[tuple[Place, int], Holding] = {}
    open_asks: dict[int, int] = {}
    open_words: dict[int, list[tuple[Holding, Word]]] = {}
    at_us = 0
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break  # it was killed while it wrote
        told: dict[str, Any] = json.loads(line)
        number, at_us = told["number"], told["at"]
        what = told["what"]
        heard.requests[what] += 1
        if what == "asks":
            open_asks[number] = at_us
        elif what == "got":
            asked_us = open_asks.pop(number)
            for partition, offset, delivery, attempt, key, value, tag in told["jobs"]:
                holding = Holding(
                    path.stem, (partition, offset), delivery, attempt, key, value, tag, asked_us, at_us
                )
                # A second one of the same is kept, too: it is a finding.
                mine.setdefault((holding.place, delivery), holding)
                heard.holdings.append(holding)
        elif what == "says":
            open_words[number] = [
                (mine[place, delivery], Word(verb, at_us)) for verb, place, delivery in _named(told["said"])
            ]
            for holding, word in open_words[number]:
                holding.words.append(word)
        elif what == "told":
            late, unknown = set(_places(told["late"])), set(_places(told.get("unknown", ())))
            for holding, word in open_words.pop(number):
                named = (holding.place, holding.delivery)
                word.outcome = "late" if named in late else "unknown" if named in unknown else "done"
                word.answered_us = at_us
        elif number in open_asks:
            heard.requests[f"receive: {told['error']}"] += 1
            heard.unheard.append((open_asks.pop(number), at_us))
        else:
            heard.requests[f"acks: {told['error']}"] += 1
            for _, word in open_words.pop(number):
                word.outcome = "not_applied" if told["outcome"] == "not_applied" else "unknown"
                word.answered_us = at_us
    heard.unheard += [(asked_us, end_us or at_us) for asked_us in open_asks.values()]


def _named(said: Mapping[str, Any]) -> Iterable[tuple[Any, Place, int]]:
    for verb, tokens in said.items():
        for place, delivery in _places(each if isinstance(each, str) else each["token"] for each in tokens):
            yield verb, place, delivery


def _places(tokens: Iterable[str]) -> Iterable[tuple[Place, int]]:
    for text in tokens:
        named = parse_token(text)
        for offset in range(named.first, named.end):
            yield (named.partition, offset), named.delivery


def check_channel(
    promise: Promise,
    heard: Heard,
    *,
    dead: Mapping[Place, int],
    ends_us: Mapping[str, int],
    faults: Sequence[Span],
) -> Found:
    """Return what is wrong when all is worked off, and the figures.

    `dead`: places and attempts of the dead at the end. `ends_us`: when a consumer was killed. `faults`: when
    something was wrong with nodes or consumers.
    """
    found = Found(records=len(promise.appended), dead=len(dead), deliveries=len(heard.holdings))
    of_place: dict[Place, list[Holding]] = defaultdict(list)
    for holding in heard.holdings:
        of_place[holding.place].append(holding)
    for held in of_place.values():
        held.sort(key=lambda each: (each.delivery, each.got_us))
    troubles = _Troubles(faults, heard.unheard)
    _mark_repeated(heard, troubles)
    _check_content(promise, of_place, found)
    _check_ends(promise, of_place, dead, found)
    for place, held in of_place.items():
        _check_done(place, held, found)
        _check_attempts(promise, place, held, dead.get(place), troubles, found)
        _check_time(promise, place, held, troubles, found)
    if promise.ordered:
        _check_order(promise, of_place, dead, found)
    spans = _joined(faults)
    found.in_flight = sum(_touches(spans, each.asked_us, _left_us(each, ends_us)) for each in heard.holdings)
    if found.redelivered > found.in_flight:
        text = f"{found.redelivered} came again, and {found.in_flight} were in flight while something failed"
        found.sentences.append(f"unexplained: {text}")
    return found


def _mark_repeated(heard: Heard, troubles: _Troubles) -> None:
    """Take a late nack or release for unknown if something failed meanwhile.

    A node sends it again when its leader dies. If the first one was carried out, the second one is late.
    """
    for holding in heard.holdings:
        for word in holding.words:
            answered_us = word.asked_us if word.answered_us is None else word.answered_us
            if (
                word.outcome == "late"
                and word.verb in ("nack", "release")
                and troubles.touch(word.asked_us, answered_us)
            ):
                word.outcome = "unknown"


class _Troubles:
    """When something was wrong; each fault lasts `AFTER_US` longer here."""

    def __init__(self, faults: Sequence[Span], unheard: Sequence[Span]) -> None:
        self._faults = _joined([(start, end + AFTER_US) for start, end in faults])
        self._unheard = _joined(unheard)

    def touch(self, start: int, end: int) -> bool:
        """Return whether there was a fault in this time."""
        return _touches(self._faults, start, end)

    def hide(self, start: int, end: int) -> bool:
        """Return whether a record may have been given out in this time to one who did not write it down."""
        return self.touch(start, end) or _touches(self._unheard, start, end)


def _joined(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _touches(spans: Sequence[Span], start: int, end: int) -> bool:
    return any(first <= end and start <= last for first, last in spans)


def _left_us(holding: Holding, ends_us: Mapping[str, int]) -> int:
    """When a consumer had done with a holding, or was killed."""
    last = holding.words[-1] if holding.words else None
    said = holding.ended_us or (last and (last.answered_us or last.asked_us))
    return said or ends_us.get(holding.consumer) or holding.got_us


def _check_content(promise: Promise, of_place: Mapping[Place, list[Holding]], found: Found) -> None:
    for place, held in of_place.items():
        appended = promise.appended.get(place)
        for each in held:
            if (each.key, each.value, each.tag) != appended:
                given = (each.key, each.value, each.tag)
                found.sentences.append(f"other: {place} is {appended}, and was given as {given}")
            if not promise.wants(each.tag):
                found.sentences.append(f"filtered: {place} has the tag {each.tag!r}, and was given")


def _check_ends(
    promise: Promise, of_place: Mapping[Place, list[Holding]], dead: Mapping[Place, int], found: Found
) -> None:
    """All that the filter takes is done, or dead with all its attempts; what is poisoned is dead."""
    for place, (_, value, tag) in promise.appended.items():
        if not promise.wants(tag):
            continue
        if place in promise.poisoned:
            if place not in dead:
                found.sentences.append(f"dead: {place} ({value}) is refused for ever, and is not dead")
            continue
        held = of_place.get(place, [])
        acked = any(each.said("ack") for each in held)
        found.done += acked and place not in dead
        if place not in dead and not acked:
            what = "was given to nobody" if not held else "was given, and neither acknowledged nor dead"
            found.sentences.append(f"lost: {place} ({value}) {what}")
    for place, attempts in dead.items():
        if attempts != promise.max_attempts:
            found.sentences.append(f"dead: {place} after {attempts} attempts, not {promise.max_attempts}")
        if any(word.outcome == "done" for each in of_place.get(place, ()) for word in each.said("ack")):
            found.sentences.append(f"dead: {place} was acknowledged, answered done, and is dead")


def _check_done(place: Place, held: Sequence[Holding], found: Found) -> None:
    """One delivery is one consumer's, and there is none after one was answered done."""
    counts = Counter(each.delivery for each in held)
    for delivery, count in counts.items():
        if count > 1:
            found.sentences.append(f"twice: {place} under delivery {delivery} to {count} consumers")
    answers = [
        word.answered_us
        for each in held
        for word in each.words
        if word.verb == "ack" and word.outcome == "done" and word.answered_us is not None
    ]
    done_us = min(answers, default=None)
    for each in held:
        if done_us is not None and each.asked_us > done_us:
            found.sentences.append(
                f"after done: {place} was done at {done_us}, and given under delivery {each.delivery} to "
                f"{each.consumer}, who asked at {each.asked_us}"
            )


def _check_attempts(
    promise: Promise,
    place: Place,
    held: Sequence[Holding],
    dead: int | None,
    troubles: _Troubles,
    found: Found,
) -> None:
    """They rise by one with each failure, and not with a release; more only where an answer may be lost."""
    last = held[-1].attempt
    if promise.max_attempts and last > (dead or promise.max_attempts):
        found.sentences.append(f"attempts: {place} was tried {last} times of {promise.max_attempts}")
    more = held[0].attempt - 1
    since_us = held[0].asked_us - more * 2_000 * promise.timeout_ms
    _count_unseen(place, 0, more, (since_us, held[0].got_us), troubles, found)
    for before, after in pairwise(held):
        if before.delivery == after.delivery:
            continue
        released = before.said("release")
        surely = any(word.outcome == "done" for word in released)
        rise = after.attempt - before.attempt
        text = f"{place}: {before.attempt} under {before.delivery}, {after.attempt} under {after.delivery}"
        if rise < 0 or (rise == 0 and not released):
            found.sentences.append(f"attempts: {text}, {'not ' if not released else ''}released")
        more = rise if surely else rise - 1
        _count_unseen(place, before.delivery, more, (before.got_us, after.got_us), troubles, found)
    if dead is not None:
        more = dead - last
        until_us = held[-1].got_us + more * 2_000 * promise.timeout_ms
        _count_unseen(place, held[-1].delivery, more, (held[-1].got_us, until_us), troubles, found)


def _count_unseen(place: Place, after: int, more: int, span: Span, troubles: _Troubles, found: Found) -> None:
    if more <= 0:
        return
    found.unseen += more
    if not troubles.hide(*span):
        found.sentences.append(
            f"attempts: {place}: {more} that no consumer had after delivery {after}, and no answer was lost"
        )


def _check_time(
    promise: Promise, place: Place, held: Sequence[Holding], troubles: _Troubles, found: Found
) -> None:
    """A record is another's only when it was given back, or its time is over, and then something failed."""
    for before, after in pairwise(held):
        if before.delivery == after.delivery or before.said("nack", "release"):
            continue
        found.redelivered += 1
        until_us = before.held_until_us(promise.timeout_ms * 1_000)
        if after.got_us < until_us:
            found.sentences.append(
                f"early: {place} was {before.consumer}'s until {until_us} at least, and was given to "
                f"{after.consumer} by {after.got_us}"
            )
        if not troubles.touch(before.asked_us, after.got_us):
            found.sentences.append(
                f"unexplained: {place} under delivery {before.delivery} of {before.consumer} came again "
                f"under {after.delivery} and nothing had failed"
            )


def _check_order(
    promise: Promise, of_place: Mapping[Place, list[Holding]], dead: Mapping[Place, int], found: Found
) -> None:
    """Of a key each record is given after the ones before it have ended, by the log and by the clock."""
    by_key: dict[tuple[int, str], list[Place]] = defaultdict(list)
    for place, (key, _, _) in promise.appended.items():
        if key and place in of_place:
            by_key[place[0], key].append(place)
    for (_, key), places in by_key.items():
        places.sort()
        for earlier, later in pairwise(places):
            first = of_place[later][0]
            last = of_place[earlier][-1]
            text = f"key {key}: {later} was given to {first.consumer} under delivery {first.delivery}"
            if last.delivery >= first.delivery:
                found.sentences.append(f"reordered: {text}, and {earlier} under {last.delivery}")
            if first.got_us < _may_end_us(of_place[earlier], earlier in dead, promise):
                found.sentences.append(f"reordered: {text}, before {earlier} was done or dead")


def _may_end_us(held: Sequence[Holding], dead: bool, promise: Promise) -> int:
    """Before when a record cannot have ended: nobody had said so, nor was its last time over."""
    acked = [word.asked_us for each in held for word in each.said("ack")]
    if not dead:
        return min(acked, default=0)
    last = held[-1]
    if last.attempt < promise.max_attempts:
        return last.got_us  # the attempts after this one were not heard of
    nacked = [word.asked_us for word in last.said("nack")]
    return min([*nacked, last.held_until_us(promise.timeout_ms * 1_000)])
