"""Why an append took long, from what was noted of a life: made histories with one answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkers import Operation
from tests.cluster.life import causes
from tests.cluster.life.causes import Probes, causes_of

MS = 1000


def append(offset: int, start_us: int, end_us: int) -> Operation:
    """An acknowledged append to partition 0."""
    return Operation(
        kind="append",
        process="w1",
        topic="t",
        partition=0,
        key="k",
        number=offset,
        start_us=start_us,
        end_us=end_us,
        offset=offset,
    )


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probes:
    """The loop was late from 400 to 500 ms, the disk from 600 to 700 ms; time ends later."""
    found = Probes(tmp_path)
    monkeypatch.setattr(causes, "now_us", lambda: 500 * MS)
    found.loop.add(100 * MS)
    monkeypatch.setattr(causes, "now_us", lambda: 700 * MS)
    found.disk.add(100 * MS)
    return found


def test_the_cause_of_an_append_is_the_change_that_it_met_or_what_was_late_for_half_of_its_time(
    probes: Probes,
) -> None:
    """Offsets 0 to 2 are of term 3, 3 and 4 of term 5, whose first was acknowledged at 250 ms."""
    terms = {("t", 0): [(0, 3), (3, 5)]}
    calm = append(0, 0, 5 * MS)
    before = append(2, 180 * MS, 190 * MS)
    met = append(3, 200 * MS, 250 * MS)
    met_too = append(4, 249 * MS, 260 * MS)
    late = append(5, 390 * MS, 500 * MS)
    synced = append(6, 650 * MS, 720 * MS)
    none = append(7, 660 * MS, 900 * MS)

    found = causes_of([calm, before, met, met_too, late, synced, none], terms, probes)

    told = [found[id(each)] for each in (calm, before, met, met_too, late, synced, none)]
    assert told == ["node", "node", "leader", "leader", "client", "disk", "node"]


def test_what_was_late_is_counted_for_as_long_as_it_was_so_in_the_span(probes: Probes) -> None:
    """Of 100 ms a half, all, and nothing."""
    spans = [(450, 900), (0, 900), (500, 900), (0, 400)]

    assert [50 * MS, 100 * MS, 0, 0] == [probes.loop.within(began * MS, ended * MS) for began, ended in spans]
