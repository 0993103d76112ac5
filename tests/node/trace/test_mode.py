"""Which records a setting names, and what a `traceparent` says."""

from __future__ import annotations

import pytest

from laminar.node.trace.mode import mode_of
from laminar.wire.trace import parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("setting", [None, "off", "", "2", "1", "0", "-0.5", "nan", "inf", 1, 0.5, "some"])
def test_what_names_no_records_traces_none(setting: object) -> None:
    assert mode_of(setting) is None


@pytest.mark.parametrize("share", [0.01, 0.25, 0.999])
def test_a_share_is_spread_evenly_over_the_offsets_of_a_partition(share: float) -> None:
    mode = mode_of(str(share))
    assert mode is not None

    for salt in (0, 1, 2**63 + 11):
        taken = [mode.takes(salt, offset) for offset in range(20_000)]
        assert abs(sum(taken) / 20_000 - share) < 0.01
        assert abs(sum(taken[:1000]) / 1000 - share) < 0.05
        assert abs(mode.about(20_000) - sum(taken)) < 200
        assert [row for row in range(500) if taken[1_000 + row]] == mode.rows(salt, 1_000, 500)


def test_all_and_sampled_take_every_place() -> None:
    for setting in ("all", "sampled"):
        mode = mode_of(setting)
        assert (
            mode is not None and mode.takes_all and mode.takes(2**64 - 1, 2**62) and mode.takes(0, -(2**62))
        )


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"42-{TRACE}-{SPAN}-01-what a later version adds", True),
    ],
)
def test_a_traceparent_is_read(text: str, sampled: bool) -> None:
    assert (bytes.fromhex(TRACE), bytes.fromhex("00f067aa0ba902b7"), sampled) == parse_traceparent(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
        f"42-{TRACE}-{SPAN}-01more",
    ],
)
def test_what_is_no_traceparent_is_none(text: str) -> None:
    assert parse_traceparent(text) is None
