"""Meters of what each principal uses of one shard; they refuse requests beyond its limits.

A rate is limited by a token bucket, which holds the amount of one second. A request is admitted while
anything is left, and its cost is taken then, even if the bucket goes below zero. So only a request's head has
to be known before, and during any time t at most the rate times (t + 1 s), and one body or answer more, is
admitted.

A refused request gets a time to ask again. Several requests that are refused at the same time get different
times, one after the other as the bucket fills: else they would all come back for an amount that is enough for
one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

from laminar.http.api.problems import Problem, over_limit
from laminar.http.protocol.flows import Flow
from membership.records import ANY_PRINCIPAL, LimitRecord

BUCKET_MS: Final = 1000
ROUNDING_MS: Final = 1e-3
LONGEST_WAIT_MS: Final = 60_000
SPREAD_MS: Final = 1000
"""The longest span over which requests that are refused at the same time are spread when they ask again."""

APART_MS: Final = 2.0
"""The shortest distance between these times: a server resumes muted connections one after the other."""

CONNECTION_WAIT_MS: Final = 1000
MOST_COUNTED: Final = 100
"""The most principals whose refusals are counted separately, for the metrics."""

OTHERS: Final = "(others)"
"""The name under which the refusals of all further principals are counted; no principal has it."""

_NO_LIMITS: Final[Mapping[str, int]] = {}


class Rate:
    """A token bucket. It stores the time at which it is full again, instead of the amount that is left."""

    __slots__ = ("_bucket_ms", "_full_ms", "limit", "per_ms")

    def __init__(self, limit: int, bucket_ms: int = BUCKET_MS) -> None:
        """Create a full bucket that holds `limit`, and fills in `bucket_ms`."""
        self.limit = limit
        self._bucket_ms = bucket_ms
        self.per_ms = bucket_ms / limit
        """The time in ms in which the bucket gains 1."""
        self._full_ms = 0.0

    def wait_ms(self, now_ms: int, *, least: int = 0) -> float:
        """Return the time in ms until the bucket has anything, or at least `least`; 0 if it has that now."""
        wait_ms = self._full_ms - now_ms - self._bucket_ms + least * self.per_ms
        return wait_ms if wait_ms > ROUNDING_MS else 0.0

    def used(self, now_ms: int) -> int:
        """Return the amount that is missing in the bucket; after a large body it may exceed `limit`."""
        return max(0, round((self._full_ms - now_ms) / self.per_ms))

    def take(self, amount: int, now_ms: int) -> None:
        """Take an amount out, even if the bucket has less."""
        self._full_ms = max(self._full_ms, now_ms) + amount * self.per_ms


class Meter:
    """Measures what one principal uses of this shard. Its limits may change at any time."""

    __slots__ = (
        "_bytes_in",
        "_bytes_out",
        "_next_ms",
        "_refused",
        "_requests",
        "flow",
        "is_limited",
        "limits",
        "name",
    )

    def __init__(
        self, name: str, limits: Mapping[str, int], refused: dict[str, int], *, of_strangers: bool = False
    ) -> None:
        """Create the meter of the principal `name`; `refused` counts refused requests by principal's name."""
        self.name = name
        self.flow = Flow(are_strangers=of_strangers)
        self._refused = refused
        self.limits = _NO_LIMITS
        self.is_limited = False
        self._requests: Rate | None = None
        self._bytes_in: Rate | None = None
        self._bytes_out: Rate | None = None
        self._next_ms = 0.0  # the time at which the next refused request may ask again
        self.limit_to(limits)

    def limit_to(self, limits: Mapping[str, int]) -> None:
        """Apply these limits from now on. A bucket whose rate does not change keeps its content."""
        self.limits = limits
        self._next_ms = 0.0
        self._requests = _rate(self._requests, limits.get("requests_per_s"))
        self._bytes_in = _rate(self._bytes_in, limits.get("bytes_in_per_s"))
        self._bytes_out = _rate(self._bytes_out, limits.get("bytes_out_per_s"))
        self.is_limited = any(each is not None for each in (self._requests, self._bytes_in, self._bytes_out))

    @property
    def counts_answers(self) -> bool:
        """Whether the bytes of answers are limited; if so, call `sent` for each answer."""
        return self._bytes_out is not None

    def admit(self, body_bytes: int, now_ms: int) -> None:
        """Count a request and its body, or refuse it.

        Raises:
            Problem: 429 `quota`, with the time after which a request is admitted again.
        """
        requests, bytes_in, bytes_out = self._requests, self._bytes_in, self._bytes_out
        if requests is not None and (wait_ms := requests.wait_ms(now_ms, least=1)):
            raise self._over("requests_per_s", requests, wait_ms, now_ms)
        if bytes_in is not None and (wait_ms := bytes_in.wait_ms(now_ms)):
            raise self._over("bytes_in_per_s", bytes_in, wait_ms, now_ms)
        if bytes_out is not None and (wait_ms := bytes_out.wait_ms(now_ms)):
            raise self._over("bytes_out_per_s", bytes_out, wait_ms, now_ms)
        if requests is not None:
            requests.take(1, now_ms)
        if bytes_in is not None:
            bytes_in.take(body_bytes, now_ms)

    def received(self, size: int, now_ms: int) -> None:
        """Count the bytes of a body whose head did not announce them."""
        if self._bytes_in is not None:
            self._bytes_in.take(size, now_ms)

    def sent(self, size: int, now_ms: int) -> None:
        """Count the bytes of an answer's body."""
        if self._bytes_out is not None:
            self._bytes_out.take(size, now_ms)

    def connection_refusal(self) -> Problem | None:
        """Return the refusal of one more connection; None if there may be one."""
        most = self.limits.get("connections")
        if most is None or self.flow.connections < most:
            return None
        self._count()
        return over_limit(
            "connections",
            self.flow.connections + 1,
            most,
            detail=f"principal {self.name!r} has {self.flow.connections} connections to this shard",
            retry_after_ms=CONNECTION_WAIT_MS,
        )

    def _over(self, what: str, rate: Rate, wait_ms: float, now_ms: int) -> Problem:
        self._count()
        wait_ms = max(wait_ms, min(self._next_ms - now_ms, wait_ms + SPREAD_MS))
        self._next_ms = now_ms + wait_ms + max(APART_MS, rate.per_ms)
        return over_limit(
            what,
            rate.used(now_ms),
            rate.limit,
            detail=f"principal {self.name!r} has used up its {what} at this shard",
            retry_after_ms=min(max(1, math.ceil(wait_ms)), LONGEST_WAIT_MS),
        )

    def _count(self) -> None:
        counted = self._refused
        name = self.name if self.name in counted or len(counted) < MOST_COUNTED else OTHERS
        counted[name] = counted.get(name, 0) + 1


class Meters:
    """The meters of a shard's principals, by the limits of its view."""

    def __init__(self) -> None:
        self._meters: dict[str, Meter] = {}
        self._limits: Mapping[str, LimitRecord] = {}
        self.refused: dict[str, int] = {}
        """By principal the number of requests refused by limits; after `MOST_COUNTED` names in `OTHERS`."""

    def of(self, name: str) -> Meter:
        """Return the meter of a principal, which counts and limits its requests; it is created if needed."""
        meter = self._meters.get(name)
        if meter is None:
            meter = self._meters[name] = Meter(name, self._limits_of(name), self.refused)
        return meter

    def follow(self, limits: Mapping[str, LimitRecord]) -> None:
        """Apply these limits to all meters from now on."""
        if limits is not self._limits:
            self._limits = limits
            for meter in self._meters.values():
                meter.limit_to(self._limits_of(meter.name))

    def keep_only(self, names: Collection[str]) -> None:
        """Drop the meters of principals without a credential, a connection, or a request in progress."""
        for name in self._meters.keys() - names:
            if not self._meters[name].flow.is_used:
                del self._meters[name]

    def _limits_of(self, name: str) -> Mapping[str, int]:
        record = self._limits.get(name) or self._limits.get(ANY_PRINCIPAL)
        return _NO_LIMITS if record is None else record.limits


def _rate(known: Rate | None, limit: int | None) -> Rate | None:
    if limit is None:
        return None
    return known if known is not None and known.limit == limit else Rate(limit)
