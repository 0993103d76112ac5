"""The demo's other parts: the picture, the look for Java, the file, the last line."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from examples.demo import run, spark_stage
from examples.demo.__main__ import main
from examples.demo.chart import chart_of, draw, minutes
from examples.demo.checks import Finding
from examples.demo.flights import Delay, Delays

DELAYS: Delays = {
    ("SFO", "2001/01"): Delay(30, 300),
    ("SFO", "2001/02"): Delay(10, -100),
    ("SEA", "2001/01"): Delay(20, 400),
    ("XNA", "2001/02"): Delay(1, -9),
}


def test_the_chart_has_the_busiest_latest_first() -> None:
    """Chosen by flights, sorted by mean; a month without flights is a hole."""
    chart = chart_of(DELAYS, airports=2)

    assert ["SEA", "SFO"] == chart.airports
    assert ["2001/01", "2001/02"] == chart.months
    assert [Delay(20, 400), Delay(40, 200)] == chart.totals
    assert [[Delay(20, 400), None], [Delay(30, 300), Delay(10, -100)]] == chart.cells
    assert (3, 61) == (chart.all_airports, chart.all_flights)


@pytest.mark.parametrize(("value", "text"), [(12.4, "12"), (-0.2, "0"), (-3.6, "−4"), (0.0, "0")])
def test_minutes_are_whole_with_a_true_minus(value: float, text: str) -> None:
    """No ``-0``."""
    assert text == minutes(value)


def test_the_picture_is_a_png_of_a_readable_size(tmp_path: Path) -> None:
    """Also of few airports, with holes, and with an airport whose city is not known."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "out" / "delays.png"

    draw(DELAYS, path, how="Computed by hand.")

    head = path.read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:])
    assert b"\x89PNG\r\n\x1a\n" == head[:8]
    assert width > 600 and height > 500


@pytest.mark.parametrize(
    ("told", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "26-ea" 2026-03-17', 26),
        ("no such thing", 0),
    ],
)
def test_the_version_of_java_is_read(told: str, version: int) -> None:
    """Java 8 calls itself 1.8, an early release 26-ea."""
    assert version == spark_stage.java_version(told)


def test_where_java_is_missing_the_way_to_it_is_said() -> None:
    """The reason is fit for the demo's last line."""
    why = spark_stage.why_not({"JAVA_HOME": "/nowhere"})

    assert why is not None
    assert "Java 17" in why


def _report(*, skipped: bool, broken: bool = False) -> run.Report:
    faults = ["not so"] if broken else []
    return run.Report([Finding("it holds", faults)], ["Spark: there is no Java"] if skipped else [])


def test_the_last_line_says_what_was_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    """A skip is no failure, unless REQUIRE names it."""
    assert run._conclude(_report(skipped=True), required="")
    assert "skipped Spark: there is no Java" in capsys.readouterr().out.splitlines()[-1]
    assert not run._conclude(_report(skipped=True), required="bcc, spark")
    assert "REQUIRE" in capsys.readouterr().out.splitlines()[-1]
    assert run._conclude(_report(skipped=False), required="spark")
    assert capsys.readouterr().out.splitlines()[-1].startswith("demo: all 1 checks held")


def test_a_broken_check_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """The fault stands under its claim, and the last line counts."""
    assert not run._conclude(_report(skipped=False, broken=True), required="")
    assert ["BROKEN it holds", "  not so"] == capsys.readouterr().out.splitlines()[1:3]


def test_a_file_of_flights_that_is_missing_or_none_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before any node is started."""
    other = tmp_path / "other.jsonl"
    other.write_text('{"a": 1}\n')
    twice = tmp_path / "twice.jsonl"
    line = '{"date":"2001/01/01 00:47","delay":66,"distance":1750,"origin":"DTW","destination":"LAS"}\n'
    twice.write_text(line * 2)

    for file, said in (
        (tmp_path / "none", "no file of flights"),
        (other, "date"),
        (twice, "two lines are equal"),
    ):
        monkeypatch.setattr(sys, "argv", ["demo", "--file", str(file), "--out", str(tmp_path / "out")])
        with pytest.raises(SystemExit) as ended:
            main()
        ran = capsys.readouterr()
        assert (2, "") == (ended.value.code, ran.out)
        assert said in ran.err
