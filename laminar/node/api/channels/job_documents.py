"""Encode jobs (records given out by a channel) as JSON documents and as server-sent events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec

from laminar.batch import Batch
from laminar.http.api.fetch_body import record_document
from laminar.http.api.problems import Problem
from laminar.node.api.channels.steps import Given
from laminar.wire.channels import token

HEARTBEAT = b":\n\n"
"""The bytes that a stream sends when it has no event: a comment, which clients ignore."""


def documents_of(given: Sequence[Given]) -> list[dict[str, Any]]:
    """Return the JSON documents of records that were given out, each with its token and attempt."""
    found: list[dict[str, Any]] = []
    for part in given:
        batches = [Batch(frame, verified=True) for frame in part.frames]
        bases = [batch.base_offset for batch in batches]
        for run in part.runs:
            offset = run.first
            while offset < run.end:
                batch = batches[bisect_right(bases, offset) - 1]
                end = min(run.end, batch.next_offset)
                assert batch.base_offset <= offset < end, f"no batch holds offset {offset}"
                for record in batch.records(offset, end):
                    document = {
                        "token": token(part.partition, record.offset, run.delivery),
                        "attempt": run.attempt,
                        "partition": part.partition,
                    }
                    found.append(document | record_document(record, batch))
                offset = end
    return found


def events_of(given: Sequence[Given]) -> list[bytes]:
    """Return a server-sent event for each record that was given out."""
    return [event("job", document) for document in documents_of(given)]


def problem_event(problem: Problem) -> bytes:
    """Return the last event of a stream that ends because of a problem."""
    return event("problem", problem.document())


def event(name: str, document: Any) -> bytes:
    """Return a server-sent event; its JSON has no line break."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(document))
