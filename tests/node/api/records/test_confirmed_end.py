"""What a read at the leader says of the end, where another replica had to answer for damage."""

from __future__ import annotations

import pytest

from laminar.node.api.records.fetch import _end_of
from laminar.node.partition.reads import Bounds


@pytest.mark.parametrize(("read", "end"), [("leader", "10"), ("replica", "7")])
def test_the_end_of_a_leaders_answer_is_the_leaders(read: str, end: str) -> None:
    """The other replica may be behind: a read up to its end would miss records that are committed."""
    theirs = [("Content-Type", "x"), ("laminar-end-offset", "7"), ("Laminar-Next-Offset", "3")]

    said = {
        name.lower(): value
        for name, value in _end_of(theirs, Bounds(start=0, end=10, committed_index=3), read)
    }

    assert {"content-type": "x", "laminar-next-offset": "3", "laminar-end-offset": end} == said
