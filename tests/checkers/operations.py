"""What clients did and saw, as values: one `Operation` a call, one `Fault` for what was done to the cluster.

A history is written as it grows, a line of JSON each, so that a run that dies leaves it. Instants are
microseconds of the recorder's own monotonic clock. `end_us` None says that no answer came: the operation may
take effect at any later time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import IO, Literal

import msgspec

Outcome = Literal["ok", "fail", "unknown"]


class Operation(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="record", tag="operation"):
    """One call of one client.

    `append`: `value` of `key` (numbers of a key grow in the order of sending), `offset` is its receipt.
    `poll`: a reader's next `values` [(offset, value)] from `offset` on, any replica's answer.
    `read`: a `leader` read, which told `end_offset`, the offset that the next record will have.
    `final`: a poll of the reading of everything after the run.
    Of outcome `fail` it is certain that nothing was done; of `unknown` nothing is.
    """

    kind: Literal["append", "poll", "read", "final"]
    process: str
    start_us: int
    end_us: int | None = None
    outcome: Outcome = "ok"
    topic: str = ""
    partition: int = -1
    key: str = ""
    number: int = -1
    offset: int | None = None
    values: list[tuple[int, str]] = []
    end_offset: int | None = None
    node: str = ""
    error: str = ""

    @property
    def value(self) -> str:
        """What an append writes: unique."""
        return f"{self.key} {self.number}"


class Fault(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="record", tag="fault"):
    """Something done to the cluster: `what` it was, to whom, from when until when."""

    what: str
    nodes: list[str]
    start_us: int
    end_us: int | None = None
    note: str = ""


class History:
    """Operations and faults in the order of their ends; with `path`, also in a file from the first on."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.operations: list[Operation] = []
        self.faults: list[Fault] = []
        self._file: IO[bytes] | None = None
        if path is not None:
            self._file = open(path, "wb")  # noqa: SIM115 - `close` closes it, in any order with what fails
        self._encoder = msgspec.json.Encoder()

    def add(self, event: Operation | Fault) -> None:
        """Note what has ended."""
        if isinstance(event, Operation):
            self.operations.append(event)
        else:
            self.faults.append(event)
        if self._file is not None:
            self._file.write(self._encoder.encode(event) + b"\n")

    def close(self) -> None:
        """Write out what is buffered. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """A history that was written. Raises msgspec.DecodeError for a line that is none."""
        decoder = msgspec.json.Decoder(Operation | Fault)
        history = cls()
        with open(path, "rb") as lines:
            for line in lines:
                history.add(decoder.decode(line))
        return history


def by_partition(operations: Iterable[Operation]) -> dict[tuple[str, int], list[Operation]]:
    """Those that know their partition, in their order."""
    found: dict[tuple[str, int], list[Operation]] = {}
    for operation in operations:
        if operation.partition >= 0:
            found.setdefault((operation.topic, operation.partition), []).append(operation)
    return found
