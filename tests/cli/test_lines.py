"""Lines: a format shows each part of a record, JSON hides nothing, a pointer finds a key."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.cli.errors import Failed, UsageError
from laminar.cli.lines import Pointer, as_json, compile_format


@dataclass(frozen=True)
class Shown:
    """A record to be shown."""

    topic: str = "flights"
    partition: int = 3
    offset: int = 812
    key: bytes | None = b"SFO"
    raw: bytes = b"hi"
    tag: str | None = "late"
    timestamp: int = 981_173_106_789
    headers: Mapping[str, bytes] = field(default_factory=lambda: {"trace": b"7"})
    large_bytes: int | None = None
    trace_id: str | None = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"%v\n", b"hi\n"),
        (r"%t %p %o %k %v\n", b"flights 3 812 SFO hi\n"),
        (r"%T\t%g\t%h", b"2001-02-03T04:05:06.789Z\tlate\ttrace=7"),
        ("%i", b"4bf92f3577b34da6a3ce929d0e0e4736"),
        (r"100%%\\", b"100%\\"),
        (r"\d", b"\\d"),
        ("", b""),
    ],
)
def test_a_format_shows_each_place(text: str, expected: bytes) -> None:
    r"""%t %p %o %k %v %T %g %h %i are the record's, %% is a percent sign, \n and \t are as in C."""
    assert expected == compile_format(text)(Shown())


def test_what_a_record_does_not_have_is_shown_as_nothing() -> None:
    """A record without key, tag and headers leaves their places empty."""
    bare = Shown(key=None, tag=None, headers={}, trace_id=None)
    assert b"[][][][]" == compile_format("[%k][%g][%h][%i]")(bare)


@pytest.mark.parametrize("text", ["%x", "%", "%v%"])
def test_an_unknown_place_is_refused(text: str) -> None:
    """A place that is none is wrong use, and the message has those that are."""
    with pytest.raises(UsageError, match="%o offset"):
        compile_format(text)


@given(raw=st.binary(), key=st.none() | st.binary())
def test_json_hides_nothing(raw: bytes, key: bytes | None) -> None:
    """Value and key come back from a JSON line as they were, as text or as base64."""
    line = as_json(Shown(raw=raw, key=key))
    shown = json.loads(line)

    def bytes_of(name: str) -> bytes | None:
        if name in shown:
            return str(shown[name]).encode()
        return base64.b64decode(shown[f"{name}_base64"]) if f"{name}_base64" in shown else None

    assert raw == bytes_of("value")
    assert key == bytes_of("key")
    assert b"\n" == line[-1:]
    assert 1 == line.count(b"\n")


def test_json_shows_how_large_a_large_record_is() -> None:
    """And no value, which is read by its offset."""
    shown = json.loads(as_json(Shown(raw=b"", large_bytes=5 << 30)))

    assert 5 << 30 == shown["value_bytes"]
    assert "value" not in shown


@pytest.mark.parametrize(
    ("pointer", "line", "expected"),
    [
        ("/origin", b'{"origin": "SFO"}', "SFO"),
        ("/a/0/b", b'{"a": [{"b": 7}]}', "7"),
        ("/a~1b/c~0d", b'{"a/b": {"c~d": "x"}}', "x"),
        ("/a", b'{"a": null}', None),
        ("/a", b"{}", None),
        ("/a", b"[1]", None),
        ("/5", b"[1]", None),
        ("", b'"all"', "all"),
        ("/a", b'{"a": {"b": 1}}', '{"b":1}'),
    ],
)
def test_a_pointer_picks_as_rfc_6901_says(pointer: str, line: bytes, expected: str | None) -> None:
    """Names and positions lead inwards; what is not there is None; what is no text is its JSON."""
    assert expected == Pointer(pointer, flag="--key-from").pick(line, number=1)


def test_a_line_that_is_no_json_is_named() -> None:
    """The message has the number of the line."""
    with pytest.raises(Failed, match="line 7 is not JSON"):
        Pointer("/a", flag="--key-from").pick(b"{", number=7)


def test_a_pointer_begins_with_a_slash() -> None:
    """``origin`` is refused, and the flag is named."""
    with pytest.raises(UsageError, match="--tag-from"):
        Pointer("origin", flag="--tag-from")
