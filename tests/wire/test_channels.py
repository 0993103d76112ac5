"""Settings of a channel as the catalog stores them."""

from __future__ import annotations

import json

from laminar.wire.channels import ChannelSettings, settings_of, stored


def test_a_setting_with_its_default_is_not_stored_though_it_was_sent() -> None:
    """So equal settings have equal documents: the catalog compares these."""
    sent = json.loads('{"timeout_ms": 30000, "order": "key", "hold_ms": 604800000, "until": null}')

    assert {"order": "key"} == stored(settings_of(sent))
    assert ChannelSettings(order="key") == settings_of(stored(settings_of(sent)))
