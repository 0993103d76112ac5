"""The lines that are kept for bundles: what is data is not in them, however a line was made."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import msgspec
import pytest

from laminar.node.host.log_rate_limit import LimitedLog
from laminar.node.host.loop_health import LoopHealth
from laminar.node.runtime.process_report import report_of
from laminar.node.runtime.recent_log import LEFT_OUT, MOST_LINES, LogLine, RecentLog

PLANTED = "planted-0123456789"


@pytest.fixture
def recent() -> Iterator[RecentLog]:
    handler = RecentLog()
    _log.addHandler(handler)
    yield handler
    _log.removeHandler(handler)


_log = logging.getLogger("laminar.test_recent_log")
_log.setLevel(logging.DEBUG)


def _shown(recent: RecentLog) -> list[LogLine]:
    found = [msgspec.structs.replace(line, arguments=line.shown({"n1", "orders"})) for line in recent.lines()]
    assert PLANTED not in json.dumps([msgspec.to_builtins(line) for line in found])
    return found


def test_a_line_has_its_text_as_in_the_program_and_known_names(recent: RecentLog) -> None:
    _log.warning("%s of %s lags by %d, for %.1f s: %s", "n1", "orders", 7, 0.5, PLANTED)
    (line,) = _shown(recent)
    assert line.text == "%s of %s lags by %d, for %.1f s: %s"
    assert line.arguments == ["n1", "orders", 7, 0.5, LEFT_OUT]
    assert (line.level, line.logger) == ("warning", "laminar.test_recent_log")
    assert line.place.startswith("test_recent_log.py:")


def test_a_text_that_is_made_is_left_out(recent: RecentLog) -> None:
    made = f"failed for {PLANTED}"
    _log.error(made)
    _log.error("failed for " + PLANTED)
    _log.error(PLANTED.upper() + "%s", PLANTED.lower())
    _log.error({"key": PLANTED})
    _log.error("of a mapping: %(key)s", {"key": PLANTED})
    texts = [line.text for line in _shown(recent)]
    assert texts == [LEFT_OUT, LEFT_OUT, LEFT_OUT, LEFT_OUT, "of a mapping: %(key)s"]


def test_objects_are_named_by_their_types(recent: RecentLog) -> None:
    _log.info("%s %s %s %s %s %s", PLANTED.encode(), ValueError(PLANTED), [PLANTED], "x" * 200, None, "(n)")
    (line,) = _shown(recent)
    assert line.arguments == ["(bytes)", "(ValueError)", "(list)", LEFT_OUT, None, LEFT_OUT]


def test_an_error_is_its_type_and_its_places(recent: RecentLog) -> None:
    try:
        int(PLANTED)
    except ValueError:
        _log.exception("it failed")
    (line,) = _shown(recent)
    assert (line.text, line.error) == ("it failed", "ValueError")
    assert len(line.frames) == 1
    assert line.frames[0].endswith("test_an_error_is_its_type_and_its_places")


def test_the_text_of_a_limited_log_is_that_of_its_caller(recent: RecentLog) -> None:
    LimitedLog(_log, now_s=lambda: 0.0).warning("kind", "refused: %s", PLANTED)
    assert [line.text for line in _shown(recent)] == ["refused: %s"]


def test_what_is_kept_is_bounded(recent: RecentLog) -> None:
    for number in range(MOST_LINES + 10):
        _log.info("line %d", number)
    _log.debug("not kept")
    _log.info("%s" * 20, *["y" * 10_000] * 20)
    found = recent.lines()
    assert len(found) == MOST_LINES and found[0].arguments == [11]
    assert len(msgspec.json.encode(found[-1])) < 1000


def test_a_report_has_places_and_no_names_of_threads_or_values() -> None:
    secret = PLANTED  # a local, which a stack with values would show
    report = report_of(1, LoopHealth(), None)
    text = msgspec.json.encode(report).decode()
    assert secret not in text and report.log == []
    assert any(" test_a_report_has_places" in place for place in report.threads[0])
    assert json.loads(text)[2]["delay_p99_seconds"] == 0.0
