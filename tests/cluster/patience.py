"""Waiting for what other processes do, and requests that are sent again where the API's contract says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from laminar.testing.cluster import get_json

PATIENCE_S = 60.0
"""It ends what hangs, and judges nothing."""


def until(condition: Callable[[], Any], what: object = "", *, patience_s: float = PATIENCE_S) -> Any:
    """Return what `condition` returns once that is true; it is asked of processes, which tell nobody."""
    deadline = time.monotonic() + patience_s
    while not (said := condition()):
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what or condition}"
        time.sleep(0.05)
    return said


def asked(http: httpx.Client, method: str, url: str, **more: Any) -> httpx.Response:
    """Send a request; again while it is answered 503 and a second one does no harm. Return the last answer.

    A leader may be elected at any time. A PUT may have been carried out by the attempt before: then the
    answer is 200 and not 201.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = http.request(method, url, **more)
        if answer.status_code != 503 or time.monotonic() > deadline:
            return answer
        if method not in ("GET", "PUT") and answer.json().get("outcome") == "unknown":
            return answer
        time.sleep(0.05)


def told(url: str, **more: Any) -> Any:
    """Return the JSON of an answer 200; ask again while there is none."""
    return until(lambda: get_json(url, timeout=PATIENCE_S, **more), url)
