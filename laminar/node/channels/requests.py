"""Requests that report the outcome of delivered records (ack, nack, release, extend), and their answers."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from laminar.wire.channels import Named

Verb: TypeAlias = Literal["ack", "nack", "release", "extend"]


class Step(NamedTuple):
    """A consumer's step about records of one delivery: acknowledge, nack, release or extend.

    `delay_ms` is a nack's pause before the next attempt; None for that of the channel's settings.
    `timeout_ms` is an extension's time from now on; None for the delivery's original time.
    """

    verb: Verb
    named: Named
    delay_ms: int | None = None
    timeout_ms: int | None = None
    reason: str = ""


class Settled(NamedTuple):
    """The answer: the number of records whose step took effect, and those whose delivery was over: `late`."""

    done: int
    late: list[Named]
