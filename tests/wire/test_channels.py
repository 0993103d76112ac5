"""Settings of a channel as the catalog stores them."""

from __future__ import annotations

import json

import msgspec
import pytest

from laminar.wire.channels import ChannelSettings, CursorStart, parse_token, settings_of, stored


def test_a_setting_with_its_default_is_not_stored_though_it_was_sent() -> None:
    """So equal settings have equal documents: the catalog compares these."""
    sent = json.loads('{"timeout_ms": 30000, "order": "key", "hold_ms": 604800000, "until": null}')

    assert {"order": "key"} == stored(settings_of(sent))
    assert ChannelSettings(order="key") == settings_of(stored(settings_of(sent)))


def test_a_start_at_a_cursor_is_stored_as_it_was_said() -> None:
    """In the catalog, and in the entry of the log that opens the channel."""
    sent = {"start": {"cursor": "billing"}}
    settings = settings_of(sent)

    assert CursorStart("billing") == settings.start and sent == stored(settings)
    assert settings == msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=ChannelSettings)


@pytest.mark.parametrize("start", [{}, {"cursor": ""}, {"cursor": "a b"}, {"cursor": "c", "more": 1}])
def test_a_start_that_names_no_cursor_is_refused(start: object) -> None:
    with pytest.raises(msgspec.ValidationError, match="start"):
        settings_of({"start": start})


@pytest.mark.parametrize(
    "text",
    ["", "0:1", "0:1:2:3", "-1:0:1", "0: 1:2", "0:1_0:2", "+0:1:2", "0:1-:2", "0:2-1:3", "0:1:²", "0:1:٣"],
)
def test_what_is_no_token_is_refused(text: str) -> None:
    """Numbers are digits alone; a range rises."""
    with pytest.raises(ValueError, match="is not a job's token"):
        parse_token(text)


def test_a_token_names_a_record_or_a_range() -> None:
    assert (3, 5, 6, 7) == parse_token("3:5:7") and (3, 5, 10, 7) == parse_token("3:5-9:7")
