"""What spans an event makes in any process, and what it is not lost by."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from laminar.otel import spans
from laminar.otel.spans import Spans
from laminar.wire.trace import EVENTS, TraceRecord

OF = Resource({"service.name": "laminar"})


def event(name: str, **more: object) -> TraceRecord:
    known = {"at": "2026-01-02T03:04:05.678Z", "topic": "t", "partition": 0, "group": "ab" * 16, "entry": 7}
    return TraceRecord(event=name, **{**known, "offset": 3, **more})  # type: ignore[arg-type]  # fields by name


def shown(found: list[ReadableSpan]) -> list[object]:
    return [(each.to_json(), each.context, each.parent) for each in found]


@pytest.mark.parametrize("name", EVENTS)
def test_another_process_makes_the_same_spans(name: str) -> None:
    of = event(name, channel="c", delivery=5, attempt=1)

    assert shown(Spans(OF).of(of)) == shown(Spans(OF).of(of))
    assert 1 == len(Spans(OF).of(of))


def test_no_two_events_make_one_span() -> None:
    every = [event(name, channel=channel, delivery=5) for name in EVENTS for channel in ("c", "d")]
    every += [event("acked", channel="c", delivery=6), event("acked", channel="c", delivery=5, offset=4)]
    every += [event("extended", channel="c", delivery=5, at="2026-01-02T03:04:05.679Z")]

    ids = [each.context.span_id for of in every for each in Spans(OF).of(of) if each.context is not None]

    # What brings a record into the log is one thing, however it is called: no record has two of these.
    sends = [of for of in every if of.event in ("appended", "published", "scheduled")]
    assert len(set(ids)) == len(every) - len(sends) + 1


def test_an_event_without_a_trace_id_is_in_the_trace_of_its_record() -> None:
    """After an election the leader may not know it."""
    made = Spans(OF)
    (first,) = made.of(event("appended", trace_id="ab" * 16, parent_id="cd" * 8))
    (second,) = made.of(event("delivered", channel="c", delivery=5))

    assert first.context is not None and second.context is not None
    assert int("ab" * 16, 16) == first.context.trace_id == second.context.trace_id
    assert second.parent is not None and first.context.span_id == second.parent.span_id


def test_an_event_of_a_newer_program_is_a_span_by_its_name() -> None:
    (span,) = Spans(OF).of(event("teleported"))

    assert "teleported t" == span.name


@pytest.mark.parametrize(
    "wrong",
    [
        {"at": "yesterday"},
        {"trace_id": "ab"},
        {"trace_id": "zz" * 16},
        {"trace_id": "ab" * 16, "parent_id": "1"},
    ],
    ids=str,
)
def test_what_is_no_event_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".*"):
        Spans(OF).of(event("appended", **wrong))


def test_a_trace_id_of_zeros_is_none() -> None:
    (span,) = Spans(OF).of(event("appended", trace_id="00" * 16))

    assert span.context is not None and span.context.is_valid


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MOST_KNOWN", 16)
    made = Spans(OF)
    for offset in range(100):
        made.of(event("delivered", offset=offset, channel="c", delivery=5, trace_id="ab" * 16))
        assert max(len(made._traces), len(made._begun)) <= 16
    process, _ = made.of(event("acked", offset=99, channel="c", delivery=5))
    assert "process t" == process.name
    assert 1 == len(made.of(event("acked", offset=0, channel="c", delivery=5)))
