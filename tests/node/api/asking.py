"""Words of the API's tests: a partition as a test asks for it, and what a problem must look like."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx

from laminar.http.api.problems import CODES

MAX_APPEND_BYTES: Final = 2 * 1024 * 1024
PROBLEM_TYPE: Final = "application/problem+json"
NDJSON: Final = "application/x-ndjson"
ENVELOPES: Final = "application/vnd.laminar.records+json"
ENVELOPE_LINES: Final = "application/vnd.laminar.records+ndjson"
BATCH: Final = "application/vnd.laminar.batch"
ARROW: Final = "application/vnd.apache.arrow.stream"


def until(
    condition: Callable[[], bool], what: Callable[[], object] = lambda: "it did not come to be"
) -> None:
    """Ask again until something is so; what is said after a minute without is `what`."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def unless_overloaded(append: Callable[[], httpx.Response]) -> httpx.Response:
    """Return the answer to a large append, asked again while the disk lags behind those before it."""
    answers: list[httpx.Response] = []

    def is_taken() -> bool:
        answers.append(append())
        return answers[-1].status_code != 503 or answers[-1].json()["code"] != "overloaded"

    until(is_taken, lambda: answers[-1].text)
    return answers[-1]


def fresh_metrics(http: httpx.Client) -> str:
    """Return the text of the metrics, looked at after this was called: a costly one is kept for up to 5 s."""
    seen = {http.get("/metrics").text}

    def is_new() -> bool:
        seen.add(http.get("/metrics").text)  # each look counts the request before it
        return len(seen) > 1

    first = next(iter(seen))
    until(is_new)
    (new,) = seen - {first}
    return new


class Partition:
    """Partition `number` of a topic, as a test asks for it."""

    def __init__(self, http: httpx.Client, topic: str, number: int = 0) -> None:
        self.http = http
        self.topic = topic
        self.number = number
        self.path = f"/v1/topics/{topic}/partitions/{number}"

    def post(
        self,
        body: bytes | str,
        kind: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        **query: Any,
    ) -> httpx.Response:
        """An append, whatever comes of it."""
        given = dict(headers or {})
        if kind is not None:
            given["Content-Type"] = kind
        return self.http.post(f"{self.path}/records", content=body, params=query, headers=given)

    def append(self, *values: str) -> int:
        """Each value as a record of its own, in one batch; the offset of the first."""
        lines = "".join(json.dumps({"value": value}) + "\n" for value in values)
        answer = self.post(lines, ENVELOPE_LINES)
        assert answer.status_code in (200, 201), answer.text
        return int(answer.json()["placed"][0]["offset"])

    def fetch(self, accept: str | None = None, **query: Any) -> httpx.Response:
        """A fetch, whatever comes of it."""
        headers = {} if accept is None else {"Accept": accept}
        return self.http.get(f"{self.path}/records", params=query, headers=headers)

    def records(self, **query: Any) -> list[dict[str, Any]]:
        """The records of a fetch that succeeds."""
        answer = self.fetch(**query)
        assert 200 == answer.status_code, answer.text
        found: list[dict[str, Any]] = answer.json()["records"]
        return found

    def values(self, **query: Any) -> list[str]:
        """Their values."""
        return [record["value"] for record in self.records(**query)]


def problem(answer: httpx.Response, status: int, code: str, **expected: Any) -> dict[str, Any]:
    """The answer is this problem, with all that every problem has; `expected` are further members."""
    assert PROBLEM_TYPE == answer.headers.get("content-type"), answer.text
    document: dict[str, Any] = answer.json()
    assert (status, code) == (answer.status_code, document["code"]), answer.text
    row = CODES[code]
    assert status == row.status == document["status"]
    assert f"/docs/errors#{code}" == document["type"]
    assert row.title == document["title"]
    assert document["outcome"] in ("not_applied", "unknown")
    if row.retriable:
        assert document["retry_after_ms"] > 0
        assert int(answer.headers["retry-after"]) >= 1
    assert expected == {name: document.get(name) for name in expected}, answer.text
    return document
