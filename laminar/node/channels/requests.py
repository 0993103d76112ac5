"""What consumers ask of a channel in one partition, and what they are answered."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from laminar.wire.channels import Named

Verb: TypeAlias = Literal["ack", "nack", "release", "extend"]


class Step(NamedTuple):
    """What a consumer says of records that it was given.

    `delay_ms`: of a nack, the pause before the next attempt; None: by the channel's settings. `timeout_ms`:
    of an extension, the time from now on; None: as at first.
    """

    verb: Verb
    named: Named
    delay_ms: int | None = None
    timeout_ms: int | None = None
    reason: str = ""


class Settled(NamedTuple):
    """How many records are as was asked, and those whose delivery is not out any more."""

    done: int
    late: list[Named]
