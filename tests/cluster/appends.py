"""Appends over plain HTTP to a cluster, in which a leader may be elected at any time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import httpx

from tests.cluster.patience import PATIENCE_S

MAY_BE_REPEATED = (409, 503, 504)


def append(
    http: httpx.Client, url: str, content: bytes | str, *, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Append to the records at `url`, and return the receipt; each record is there once.

    An append that has an `Idempotency-Key` may be sent again when its outcome is unknown.
    """
    given = {"Idempotency-Key": uuid.uuid4().hex, **(headers or {})}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = http.post(url, content=content, headers=given)
        if answer.is_success:
            receipt: dict[str, Any] = answer.json()
            return receipt
        assert answer.status_code in MAY_BE_REPEATED and time.monotonic() < deadline, answer.text
        time.sleep(0.05)
