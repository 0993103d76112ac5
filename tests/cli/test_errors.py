"""Faults: one line with everything that is known, and a code a script can act on."""

from __future__ import annotations

import pytest

from laminar.batch import Batch, BatchError, build
from laminar.cli.errors import HINTS, Failed, UsageError, code_of, line_of, report
from laminar.cli.exit_codes import EXIT_FAILED
from laminar.client import errors
from laminar.http.api.problems import CODES


def test_the_line_has_code_field_value_limit_and_hint() -> None:
    """Everything the server said, on one line, whatever line breaks it had."""
    error = errors.from_problem(
        422,
        {
            "code": "invalid",
            "detail": "too\nmany",
            "field": "partitions",
            "value": 9999,
            "limit": 4096,
            "hint": "fewer",
        },
        asked="PUT /v1/topics/a",
    )

    assert "invalid: too many (field=partitions, value=9999, limit=4096); fewer" == line_of(error)


def test_a_hint_is_in_words_of_this_command() -> None:
    """The server's hint speaks of HTTP; where the command line has a word for it, that is shown."""
    error = errors.from_problem(404, {"code": "no_such_topic", "detail": "none", "hint": "PUT it"}, asked="")

    assert "laminar topic create" in line_of(error)
    assert HINTS.keys() <= CODES.keys()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Error("x"), 1),
        (errors.NotFound("x"), 1),
        (errors.OutcomeUnknown("x"), 1),
        (errors.ConfigError("x"), 2),
        (errors.ProduceError("x", undelivered=[]), 3),
        (errors.Unavailable("x"), 4),
        (errors.Overloaded("x"), 1),
        (errors.from_problem(507, {"code": "disk_full", "outcome": "not_applied"}, asked=""), 4),
        (errors.TimedOut("x"), 4),
    ],
    ids=lambda each: type(each).__name__,
)
def test_each_family_has_its_exit_code(error: errors.Error, code: int) -> None:
    """1 failed, 2 wrongly used, 3 in part, 4 no node could do it now."""
    assert code == code_of(error)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("not so"), 2, "laminar: not so\n"),
        (Failed("broken"), 1, "laminar: broken\n"),
        (Failed("in part", code=3), 3, "laminar: in part\n"),
        (
            FileNotFoundError(2, "No such file or directory", "/x"),
            1,
            "laminar: /x: No such file or directory\n",
        ),
        (ZeroDivisionError("ours"), None, ""),
    ],
)
def test_what_is_reported_is_one_line_and_a_code(
    error: Exception, code: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """None for our own mistake, whose traceback is wanted."""
    assert code == report(error)
    assert said == capsys.readouterr().err


def test_records_that_cannot_be_read_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """As every other fault, with where to go on; no traceback."""
    frame = build([b"x"], tags=["tag"])
    frame[frame.index(b"tag")] = 0xFF
    with pytest.raises(BatchError) as unreadable:
        _ = Batch(frame, verified=True).tags

    assert EXIT_FAILED == report(unreadable.value)
    said = capsys.readouterr().err
    assert 1 == said.count("\n") and "records 0 to 0" in said and "--on-damage skip" in said
