"""The audit log of a shard: it records admins' calls and refused requests, and writes them to topic `_audit`.

Invariants:

1. *No request waits for the audit.* A record is queued in memory when the request is answered; a task writes
   what is queued. An operator who repairs a broken cluster is answered even if `_audit` takes no appends.
2. *Nothing is lost silently.* A line of the node's log is written first. Records that found no room in the
   queue are counted (`laminar_audit_dropped_total`); a record `missed` tells their number once writes
   succeed.
3. *A flood makes few records.* Refusals, reads and failed calls are counted by principal, address and
   request (`summaries`). They may fill only half of the queue, so there is always room for changes.
4. *No secret is in it*: no query, header or body. A token in a path is cut.

A batch is repeated with the same idempotency key until it is durable, so it is in the topic once.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from laminar.http.api.names import AUDIT_TOPIC
from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import format_time
from laminar.http.protocol.errors import HttpError
from laminar.http.protocol.flows import Flow
from laminar.http.protocol.messages import Request, Response
from laminar.http.protocol.request_head import RequestHead
from laminar.node.access.principals import ANYONE, UNPROVEN, Principal
from laminar.node.access.tokens import id_of
from laminar.node.api.audit.summaries import Summaries
from laminar.node.api.common.forwarding import host_of
from laminar.node.api.common.services import MakeTopic, ShardServices
from laminar.node.host.periodic import Work
from laminar.wire.audit import DATAGRAM, NO_ANSWER, AuditRecord, Kind

_log = logging.getLogger("laminar.audit")

MOST_QUEUED: Final = 1000
"""The most records that wait in memory; more are counted and dropped."""
MOST_AT_ONCE: Final = 100
"""The most records of one append."""
MOST_REFUSED: Final = 30
"""The most pairs of principal and address whose refusals have records of their own, in a minute.

Requests without a proven principal have the same number for themselves.
"""
MOST_ALIKE: Final = 100
"""The most kinds of admins' reads and failed calls that have records of their own, in a minute."""
RETENTION: Final = {"retention_ms": 90 * 24 * 3_600_000, "retention_bytes": 1 << 30}
"""Settings of a new `_audit`; an admin may change them."""

TICK_S: Final = 0.25
"""How often a batch is written. Each batch is an idempotency key, of which a partition remembers 32,768."""
PAUSE_MS: Final = 500
LONGEST_PAUSE_MS: Final = 30_000
_LONGEST_PATH: Final = 300

REFUSED: Final = frozenset((401, 403))

# The form of tokens (`laminar.node.access.tokens`), also of one that is cut short or too long.
_TOKEN: Final = re.compile(r"(lam_[0-9a-fA-F]*)_[A-Za-z0-9_-]*")
_UNSEEN: Final = re.compile(r"[^ -~]")

Append = Callable[[bytes, str], Awaitable[None]]
"""Appends lines of JSON to `_audit`, once for each key. Raises `Problem`."""


class Asked:
    """A request as the audit sees it: its principal, operation and parameters, as far as they are known."""

    __slots__ = ("operation", "params", "principal", "request")

    def __init__(
        self,
        request: Request,
        principal: Principal,
        operation: str = "",
        params: Mapping[str, str] | None = None,
    ) -> None:
        self.request = request
        self.principal = principal
        self.operation = operation
        self.params = {} if params is None else params


class _Batch(NamedTuple):
    """The lines of one append that is under way, their number, and their idempotency key."""

    lines: bytes
    records: int
    key: str
    stands_for: int
    """The number of requests that the lines stand for, without those of a record `missed` among them."""
    missed: int
    """The number of dropped requests in the record `missed`; 0 if the batch has none."""


class AuditLog:
    """The audit log of one shard: queues the noted requests; a task writes them to `_audit`."""

    def __init__(
        self, services: ShardServices, append: Append, make_topic: MakeTopic, *, makes_topic: bool
    ) -> None:
        """Create the log, which writes its records to the topic `_audit` with `append`.

        If the topic does not exist and `makes_topic` is true, `make_topic` creates it. If `makes_topic` is
        false, records are dropped until the topic exists.
        """
        self._services = services
        self._append = append
        self._make_topic = make_topic
        self._makes_topic = makes_topic
        self._queue: deque[AuditRecord] = deque()
        # Separate, so that a flood of requests without tokens hides no principal.
        self._strangers, self._refusals = Summaries(MOST_REFUSED), Summaries(MOST_REFUSED)
        self._alike = Summaries(MOST_ALIKE)
        self._batch: _Batch | None = None  # is being written
        self._pause_ms = PAUSE_MS
        self._not_before_ms = 0
        self._missed = 0
        self._calls = 0
        self._refused = 0
        self._written = 0
        self._dropped = 0
        services.every(TICK_S, self._tick, to_the_end=True)

    # -- noting requests -------------------------------------------------------------------

    def answered(self, asked: Asked, response: Response) -> None:
        """Note a call that was carried out, with its answer."""
        made = next((value for name, value in response.headers if name == "Location"), "")
        self._note_call(asked, response.status, "", made if response.status == 201 else "")

    def failed(self, asked: Asked, error: BaseException, *, is_call: bool) -> None:
        """Record in the audit that `error` ended a request: a refusal, or a call of an admin (`is_call`)."""
        status, code = NO_ANSWER, ""
        if isinstance(error, Problem):
            status, code = error.status, error.code
        elif isinstance(error, HttpError):
            status, code = error.status, error.reason
        elif isinstance(error, Exception):
            status, code = 500, "internal_error"
        if status in REFUSED:
            self._note_refusal(asked, status, code)
        elif is_call:
            self._note_call(asked, status, code, "")

    def _note_call(self, asked: Asked, status: int, code: str, made: str) -> None:
        if not self._is_on:
            return
        self._calls += 1
        request = asked.request
        if request.method not in ("GET", "HEAD") and (status < 400 or status >= 500):
            # A call that changed something, or may have, always has a record of its own.
            self._keep(self._record("call", asked, status, code, made), is_change=True)
            return
        key = (asked.principal.name, host_of(request.peer), request.method, request.path, status)
        self._keep_if_new(self._alike, key, lambda: self._record("call", asked, status, code, made))

    def _note_refusal(self, asked: Asked, status: int, code: str) -> None:
        if not self._is_on:
            return
        self._refused += 1
        key = (asked.principal.name, host_of(asked.request.peer), status)
        among = self._strangers if asked.principal is UNPROVEN else self._refusals
        self._keep_if_new(among, key, lambda: self._record("refused", asked, status, code, ""))

    def _keep_if_new(self, among: Summaries, key: Hashable, make: Callable[[], AuditRecord]) -> None:
        record = among.add(key, make, now_ms=self._services.clock.wall_ms())
        if record is not None:
            self._keep(record)

    @property
    def _is_on(self) -> bool:
        return self._makes_topic or AUDIT_TOPIC in self._services.view.topics()

    def _record(self, kind: Kind, asked: Asked, status: int, code: str, made: str) -> AuditRecord:
        request = asked.request
        authorization = request.headers.get("authorization", "")
        subject = {name: _shown(value) for name, value in asked.params.items()}
        if made:
            subject["location"] = _shown(made)
        return AuditRecord(
            kind=kind,
            time=format_time(self._services.clock.wall_ms()),
            node=self._services.node,
            shard=self._services.number,
            principal=asked.principal.name,
            credential=asked.principal.credential or id_of(authorization.rpartition(" ")[2]),
            address=host_of(request.peer),
            method=request.method,
            path=_shown(request.path),
            operation=asked.operation,
            subject=subject,
            status=status,
            code=code,
        )

    def _keep(self, record: AuditRecord, *, is_change: bool = False) -> None:
        """Log the record and queue it for `_audit`. Only changes may fill the second half of the queue."""
        _say(record)
        if len(self._queue) < (MOST_QUEUED if is_change else MOST_QUEUED // 2):
            self._queue.append(record)
        else:
            self._drop(record.count)

    def _drop(self, count: int) -> None:
        if not self._missed:
            _log.warning("%s accepts no records: from now on audit records are in this log only", AUDIT_TOPIC)
        self._missed += count
        self._dropped += count

    def statistics(self) -> dict[str, int]:
        """Return the counters of the audit, and the number of records that wait."""
        return {
            "calls": self._calls,
            "refused": self._refused,
            "written": self._written,
            "dropped": self._dropped,
            "waiting": self._waiting,
        }

    def close(self) -> None:
        """Log the number of records that were not written to `_audit` before this process ends."""
        if self._waiting or self._missed:
            _log.warning(
                "this process ends, and %d audit records are not in %s",
                self._waiting + self._missed,
                AUDIT_TOPIC,
            )

    @property
    def _waiting(self) -> int:
        return len(self._queue) + (self._batch.records if self._batch is not None else 0)

    # -- writing to the topic --------------------------------------------------------------

    def _tick(self) -> Work | None:
        """Return the coroutine that writes the next batch; None if there is none, or during a pause."""
        now_ms = self._services.clock.wall_ms()
        for summaries in (self._strangers, self._refusals, self._alike):
            if summaries.due(now_ms):
                for record in summaries.take():
                    self._keep(record)
        waits = self._batch is not None or self._queue or self._missed
        if not waits or self._services.clock.monotonic_ms() < self._not_before_ms:
            return None
        return self._write()

    async def _write(self) -> None:
        """Write a batch.

        After a failure the batch is retained and retried after a pause, longer each time.
        """
        try:
            await self._write_batch()
            self._pause_ms = PAUSE_MS
        except Problem as problem:
            self._wait(str(problem))
            if self._batch is not None and problem.status < 500 and problem.code not in _PASSES:
                self._missed += self._batch.missed  # counted as dropped before
                self._drop(self._batch.stands_for)  # it will never be accepted
                self._batch = None
        except Exception as error:  # noqa: BLE001  # logged, and tried again: it must not end the process
            self._wait(repr(error))

    def _wait(self, why: str) -> None:
        if self._pause_ms == PAUSE_MS:
            _log.warning("%s accepts no records, %d wait: %s", AUDIT_TOPIC, self._waiting, why)
        self._not_before_ms = self._services.clock.monotonic_ms() + self._pause_ms
        self._pause_ms = min(2 * self._pause_ms, LONGEST_PAUSE_MS)

    async def _write_batch(self) -> None:
        if AUDIT_TOPIC not in self._services.view.topics():
            await self._make_topic(AUDIT_TOPIC, partitions=1, settings=RETENTION)
        if self._batch is None:
            self._batch = self._next_batch()
        await self._append(self._batch.lines, self._batch.key)
        self._written += self._batch.records
        self._batch = None

    def _next_batch(self) -> _Batch:
        records = [self._queue.popleft() for _ in range(min(len(self._queue), MOST_AT_ONCE))]
        stands_for, missed = sum([record.count for record in records]), self._missed
        if missed:
            said = AuditRecord(
                kind="missed",
                time=format_time(self._services.clock.wall_ms()),
                node=self._services.node,
                shard=self._services.number,
                count=missed,
            )
            records.append(said)
            self._missed = 0
        lines = b"".join([msgspec.json.encode(record) + b"\n" for record in records])
        return _Batch(lines, len(records), self._services.rng.randbytes(16).hex(), stands_for, missed)


# Refusals with 4xx that may pass: the topic does not exist yet, or there are too many partitions.
_PASSES: Final = frozenset(("no_such_topic", "no_such_partition", "quota"))


def _say(record: AuditRecord) -> None:
    """Write a record as a line of the node's log."""
    level = logging.WARNING if record.kind == "refused" else logging.INFO
    again = f", {record.count} times since {record.first}" if record.count > 1 else ""
    _log.log(
        level,
        "%s: %s %s %s from %s: %d%s%s",
        record.kind,
        record.principal,
        record.method,
        record.path,
        record.address,
        record.status,
        f" {record.code}" if record.code else "",
        again,
    )


def _shown(text: str) -> str:
    """Return a client's text as it may be stored: bounded, printable, without a token's secret."""
    plain = unquote(text)
    if "lam_" in plain:
        text = _TOKEN.sub(r"\1_(cut)", plain)
    text = _UNSEEN.sub("?", text)
    return text if len(text) <= _LONGEST_PATH else f"{text[:_LONGEST_PATH]}..."


def by_datagram(topic: str, partition: int, principal: Principal, peer: str) -> Asked:
    """Return an append by datagram from `peer` (``host:port``) as the audit sees it."""
    target = f"/v1/topics/{quote(topic, safe='')}/partitions/{partition}/records"
    request = Request(RequestHead(DATAGRAM, target, {}), b"", Source(peer))
    params = {"topic": topic, "partition": str(partition)}
    return Asked(request, principal, "append_to_partition", params)


class Source:
    """The stand-in for a client's connection in appends of the audit, of the trace, and by datagram."""

    def __init__(self, peer: str = "audit") -> None:
        self.context: Any = ANYONE
        self._peer = peer

    @property
    def peer(self) -> str:
        """The name or address of the sender."""
        return self._peer

    @property
    def certificate(self) -> None:
        """Always None: there is no TLS client."""
        return None

    @property
    def flow(self) -> None:
        """Always None: internal appends do not wait for a fair share."""
        return None

    def read_refusal(self) -> None:
        """Return None: the audit reads nothing."""

    def join(self, flow: Flow) -> None:
        """Do nothing: there is no connection whose requests could be limited."""
