"""The bound form of gossip, without a socket: what is taken, and what an answer is sent for."""

from __future__ import annotations

import os
import random

import pytest

from membership.sealing import bound
from membership.sealing.bound import HEAD_BYTES, WINDOW, BoundForm, _Window

KEY = b"k" * 32


class End:
    """One process, at an address."""

    def __init__(self, address: str, *, keys: list[bytes] | None = None) -> None:
        self.address = address
        self.keys = keys or [KEY]
        self.form = BoundForm(lambda: self.keys, os.urandom)


def pass_on(data: bytes, sender: End, receiver: End) -> list[bytes]:
    """Bring a datagram, and what is sent because of it, there and back; return the bodies that were taken."""
    taken, ends = [], (sender, receiver)
    for _ in range(10):
        opened = ends[1].form.open(data, ends[0].address)
        if opened.body is not None:
            taken.append(opened.body)
        if opened.send is None:
            return taken
        address, data = opened.send
        assert address == ends[0].address
        ends = ends[1], ends[0]
    raise AssertionError("they answer each other without end")


def send(body: bytes, sender: End, receiver: End) -> list[bytes]:
    return pass_on(sender.form.close(body, receiver.address), sender, receiver)


def test_the_first_datagram_is_challenged_and_each_is_taken_once() -> None:
    """Each direction for itself; later ones need no challenge."""
    a, b = End("a"), End("b")
    first = a.form.close(b"1", "b")
    assert "challenged" == b.form.open(first, "a").outcome
    assert [b"1"] == pass_on(first, a, b) and [b"2"] == send(b"2", a, b) and [b"3"] == send(b"3", b, a)

    third = a.form.close(b"3", "b")
    assert b"3" == b.form.open(third, "a").body
    assert "replayed" == b.form.open(third, "elsewhere").outcome
    assert "replayed" == a.form.open(third, "b").outcome  # sent back


def test_a_restart_on_either_side() -> None:
    """The one that starts again is heard after a challenge, and nothing of before is."""
    a, b, c = End("a"), End("b"), End("c")
    send(b"0", a, b)
    late = a.form.close(b"late", "b")
    a, old = End("a"), a
    assert [b"1"] == send(b"1", a, b)
    assert [b"late"] == pass_on(late, old, b), "it was on the way when its sender ended"

    recorded = [a.form.close(b"x", "b") for _ in range(3)]
    b = End("b")  # it has forgotten everything
    for data in [*recorded, late]:
        opened = b.form.open(data, "thief")
        assert opened.body is None and opened.send is not None
        assert len(opened.send[1]) <= HEAD_BYTES < len(data)
        assert c.form.open(data, "thief").body is None  # nor does another process take it
    assert [b"2"] == send(b"2", a, b)


def test_a_recorded_challenge_does_nothing_and_none_is_answered_twice() -> None:
    """It counts for one datagram, once; a loop of two that misunderstand each other ends."""
    a, b = End("a"), End("b")
    data = a.form.close(b"1", "b")
    challenge = b.form.open(data, "a").send
    assert challenge is not None
    assert a.form.open(challenge[1], "b").send is not None
    assert a.form.open(challenge[1], "b") == bound.Opened(outcome="replayed")
    assert End("other").form.open(challenge[1], "b") == bound.Opened(outcome="replayed")

    class Deaf(End):
        """It has a new nonce each time."""

    deaf, count = Deaf("d"), 0
    data = a.form.close(b"1", "d")
    while True:
        deaf.form._own = os.urandom(32)
        challenged = deaf.form.open(data, "a").send
        assert challenged is not None
        again = a.form.open(challenged[1], "d").send
        if again is None:
            break
        count, data = count + 1, again[1]
    assert 1 == count


def test_datagrams_may_overtake_each_other_within_the_window() -> None:
    """As the plain rule has it: new, and not too old."""
    rng = random.Random(1)
    for _ in range(50):
        window, had, highest = _Window(b""), set(), 0
        for _ in range(200):
            number = max(1, highest + rng.choice([1, 1, 2, rng.randint(-WINDOW - 5, 5), WINDOW, WINDOW + 1]))
            right = number not in had and number > highest - WINDOW
            assert window.takes(number) == right, (number, highest)
            if right:
                had.add(number)
                highest = max(highest, number)


def test_memory_is_bounded_and_the_forgotten_are_not_new_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was forgotten is challenged as a stranger is, with a nonce that nobody has recorded."""
    monkeypatch.setattr(bound, "MOST_SENDERS", 3)
    b, ends = End("b"), [End(f"a{number}") for number in range(5)]
    send(b"0", ends[0], b)
    recorded = ends[0].form.close(b"x", "b")
    assert b"x" == b.form.open(recorded, "a0").body
    for end in ends[1:]:
        assert [b"1"] == send(b"1", end, b)
    assert 3 == len(b.form._heard)
    assert b.form.open(recorded, "thief").body is None
    assert [b"2"] == send(b"2", ends[0], b) and [b"3"] == send(b"3", ends[4], b)
    many = End("m")
    for number in range(1_000):
        many.form.close(b"x", f"address {number}")
    assert bound.MOST_SENT == len(many.form._sent)


def test_what_has_no_key_is_not_even_challenged() -> None:
    """Also a challenge; and a change of any byte."""
    a, b, stranger = End("a"), End("b"), End("s", keys=[b"x" * 32])
    assert bound.Opened(outcome="bad_signature") == b.form.open(stranger.form.close(b"1", "b"), "s")
    right = a.form.close(b"body", "b")
    for position in range(len(right)):
        changed = bytearray(right)
        changed[position] ^= 1
        assert "bad_signature" == b.form.open(bytes(changed), "a").outcome
    challenge = stranger.form.open(stranger.form.close(b"", "s"), "s")
    assert challenge.send is None
    for size in range(HEAD_BYTES):
        assert "bad_signature" == b.form.open(right[:size], "a").outcome
