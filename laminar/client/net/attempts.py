"""Attempts at one request: the request is sent again until an answer is final or the deadline has passed.

`Attempts` carries out what `policy.retry` decides: one attempt at a time, with pauses in between, each at the
node that the caller chooses or that the last answer named. The caller decides what is requested, which nodes
are asked, and whether it accepts a successful answer (`reject`). Failed connections and refusing answers are
judged in one place, so `Session.call` and `Session.fetch` follow the same rules.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from laminar.client.errors import Error, OutcomeUnknown, TimedOut, client_closed, from_problem, untrusted
from laminar.client.net.authorization import Authorization
from laminar.client.net.pool import Pool
from laminar.client.policy.retry import DONE, Backoff, Step, Verdict, judge_answer, judge_loss
from laminar.client.policy.routing import Balancer
from laminar.http.protocol.answer import Answer, Buffer, ConnectionFailed, TlsFailed

# An attempt that fails less than this time before its request's deadline was cut off by the deadline.
CUT_OFF_S = 0.05
# With less time left, no further attempt begins: it would be cut off, and its outcome would be unknown.
LEAST_ATTEMPT_S = 0.005


def now_ms() -> int:
    """Return the monotonic clock in whole milliseconds."""
    return time.monotonic_ns() // 1_000_000


def retry_after_ms(answer: Answer, problem: Mapping[str, Any]) -> int | None:
    """Return the pause in ms that a server asked for; None if it asked for none.

    The problem document is read first: it gives milliseconds, the ``Retry-After`` header whole seconds.
    """
    exact = problem.get("retry_after_ms")
    if isinstance(exact, int):
        return exact
    header = answer.headers.get("retry-after", "")
    return int(header) * 1000 if header.isdecimal() else None


def origin_of(location: str) -> str:
    """Return scheme, host and port of the URL in a ``Location`` header; other text unchanged."""
    if location.startswith(("http://", "https://")):
        parts = urlsplit(location)
        return f"{parts.scheme}://{parts.netloc}"
    return location


def judged(answer: Answer, *, repeatable: bool, redirects: int) -> tuple[Verdict, dict[str, Any]]:
    """Return what to do after an answer (retry, redirect, fail), and its problem document ({} if none)."""
    if 200 <= answer.status < 300:
        return DONE, {}
    body = answer.json()
    problem: dict[str, Any] = body if isinstance(body, dict) else {}
    verdict = judge_answer(
        status=answer.status,
        code=problem.get("code"),
        location=answer.headers.get("location"),
        retry_after_ms=retry_after_ms(answer, problem),
        repeatable=repeatable,
        redirects=redirects,
        outcome=problem.get("outcome"),
    )
    return verdict, problem


class Caller(Protocol):
    """The part of a session that its attempts use; they increment its counts `retries` and `redirects`."""

    closed: bool
    pool: Pool
    balancer: Balancer
    rng: random.Random
    retries: int
    redirects: int
    authorization: Authorization

    def may_ask(self, url: str) -> bool:
        """Return whether the node at `url` may be asked; if not, other nodes are asked to forward to it."""
        ...

    def knows_another_node(self, urls: Collection[str]) -> bool:
        """Return whether a node is known whose URL is not in `urls`."""
        ...


class Attempts:
    """The attempts at one request. `send` makes one; `pause` waits until the next one is due.

    `what` names the request in errors. `changes` says that the request may change something, so that the
    outcome is unknown if an answer is lost. `repeatable` says that the request may be sent again even then.
    `deadline` is in seconds of `time.monotonic`; `timeout_s` is only for the text of errors.
    """

    def __init__(
        self, caller: Caller, what: str, *, timeout_s: float, deadline: float, changes: bool, repeatable: bool
    ) -> None:
        self._caller = caller
        self._what = what
        self._timeout_s = timeout_s
        self._deadline = deadline
        self._changes = changes
        self._repeatable = repeatable
        self._backoff = Backoff(rng=caller.rng)
        self._redirects = 0
        self._last = ""
        self._last_code = ""
        self._maybe_applied = False
        self._untrusted: set[str] = set()
        self.verdict = Verdict(step=Step.RETRY)
        self.problem: Mapping[str, Any] = {}

    def left_s(self) -> float:
        """Return the seconds that are left for another attempt.

        Raises:
            TimedOut: too few are left. The error's ``fields`` have the last answer's code as `last_code`.
            OutcomeUnknown: too few are left, or the client was closed, and an earlier attempt may have
                changed something.
            Unavailable: the client was closed, and no attempt has changed anything.
        """
        if self._caller.closed:
            raise client_closed(maybe_applied=self._maybe_applied and self._changes)
        left_s = self._deadline - time.monotonic()
        if left_s > (LEAST_ATTEMPT_S if self._last else 0):
            return left_s
        last = self._last or "no attempt was made"
        message = f"{self._what} was not answered within {self._timeout_s:g} s; last: {last}"
        if self._maybe_applied and self._changes:
            raise OutcomeUnknown(message, code="outcome_unknown", outcome="unknown")
        fields = {"last_code": self._last_code} if self._last_code else {}
        raise TimedOut(message, code="timed_out", retriable=True, outcome="not_applied", fields=fields)

    async def send(
        self,
        url: str,
        head: bytes,
        body: Buffer = b"",
        *,
        timeout_s: float,
        bodyless: bool = False,
        accept: Collection[int] = (),
        measured: bool = False,
    ) -> Answer | None:
        """Send the request to `url` once; return the answer if it succeeded or its status is in `accept`.

        None means that the request is to be sent again: `verdict` and `problem` say why; call `pause` next.
        `timeout_s` limits this attempt. With `measured`, the balancer uses the latency of the answer when it
        chooses among replicas.

        Raises:
            Error: the answer is final. The `outcome` of the error includes earlier attempts: it is unknown if
                one of them may have changed something.
            Untrusted: no known node has a certificate that is accepted, or this node failed that check twice.
            OutcomeUnknown: the connection was lost, and the request may not be repeated; or as `left_s`.
            TimedOut: as `left_s`.
            Unavailable: as `left_s`.
        """
        caller = self._caller
        left_s = self.left_s()
        answer: Answer | None = None
        self.problem = {}
        token = caller.authorization.version
        started = time.perf_counter()
        caller.balancer.started(url)
        try:
            answer = await caller.pool.ask(
                url, head, (body,) if body else (), timeout_s=min(left_s, timeout_s), bodyless=bodyless
            )
        except ConnectionFailed as failure:
            # If our own deadline cut this attempt off, errors name the failure of the attempt before it.
            if not self._last or time.monotonic() < self._deadline - CUT_OFF_S:
                self._last, self._last_code = str(failure), ""
            self.verdict = judge_loss(sent=failure.sent, repeatable=self._repeatable)
            caller.balancer.failed(url, now_ms=now_ms())
            if isinstance(failure, TlsFailed) and self._is_final(url):
                error = untrusted(failure)
                if self._maybe_applied and self._changes:
                    error.outcome = "unknown"
                raise error from None
        except BaseException:
            caller.balancer.finished(url, latency_us=None)
            raise
        else:
            latency_us = (time.perf_counter() - started) * 1e6 if measured else None
            caller.balancer.finished(url, latency_us=latency_us)
            if answer.status in accept:
                return answer
            self.verdict, self.problem = judged(
                answer, repeatable=self._repeatable, redirects=self._redirects
            )
            if self.verdict.step is Step.DONE:
                return answer
            if answer.status == 401 and caller.authorization.may_pass(url, token):
                self.verdict = Verdict(step=Step.RETRY)
            if self.verdict.location and not caller.may_ask(origin_of(self.verdict.location)):
                self.verdict = Verdict(step=Step.RETRY)
            self._last = str(self.problem.get("detail") or f"{url} answered {answer.status}")
            self._last_code = str(self.problem.get("code") or "")
            if self.verdict.avoid:
                caller.balancer.failed(url, now_ms=now_ms(), started=False)
        self._maybe_applied |= self.verdict.maybe_applied
        if self.verdict.step is Step.FAIL:
            raise self._failure(url, answer)
        return None

    def _is_final(self, url: str) -> bool:
        """Note that TLS with `url` failed; return whether that ends the request: no other node is left."""
        again = url in self._untrusted
        self._untrusted.add(url)
        return again or not self._caller.knows_another_node(self._untrusted)

    def _failure(self, url: str, answer: Answer | None) -> Error:
        if answer is None:
            return OutcomeUnknown(f"{self._what}: {self._last}", code="outcome_unknown", outcome="unknown")
        error = from_problem(answer.status, self.problem, asked=self._what)
        error = self._caller.authorization.explain(url, error)
        if self._maybe_applied and self._changes:
            error.outcome = "unknown"  # the answer's own outcome is that of the last attempt alone
        return error

    def reject(self, url: str, why: str) -> None:
        """Treat a successful answer of `url` as a failed attempt, because of `why`, so that it is repeated.

        The balancer then prefers other nodes for a while.
        """
        self._last, self._last_code = why, ""
        self.verdict = Verdict(step=Step.RETRY)
        self._caller.balancer.failed(url, now_ms=now_ms(), started=False)

    async def pause(self) -> str | None:
        """Wait as long as the last verdict requires; return the URL to ask next, None for any node."""
        verdict = self.verdict
        if verdict.step is Step.FOLLOW:
            self._caller.redirects += 1
            self._redirects += 1
            assert verdict.location is not None, "a redirect without a location"
            return origin_of(verdict.location)
        self._caller.retries += 1
        self._redirects = 0
        wait_s = max(self._backoff.next_ms(), verdict.wait_ms) / 1000
        await asyncio.sleep(max(0.0, min(wait_s, self._deadline - time.monotonic())))
        return origin_of(verdict.location) if verdict.location else None
