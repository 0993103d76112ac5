"""The deliveries that end in one turn: acknowledged, failed, released, or expired.

The steps of consumers are compared with the table as of the log's end, and converted to the changes that the
leader proposes. If a record is named twice in a turn, the first step counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from laminar.node.channels.requests import Settled, Step, Verb
from laminar.node.partition.state.channel_changes import (
    TIME_OUT,
    Acknowledged,
    Change,
    Failed,
    runs_of,
    spaced,
    spaced_runs,
)
from laminar.node.partition.state.channels import Channel, Out
from laminar.wire.channels import Named

REASON_BYTES: Final = 200
"""Most bytes of a reason; what is longer is cut.

Each entry that moves the log's start has the reasons of all that is aside, up to 200,000 (`MAX_OPEN_HERE`),
and no entry is larger than 63 MiB: else the log would keep all that follows.
"""


class Ends:
    """Collects the changes of one turn that end deliveries."""

    def __init__(self) -> None:
        # By channel, then by offset: the acknowledged records, as they were out.
        self.acked: dict[int, dict[int, Out]] = {}
        # By channel and reason: (offset, what was out, delay in ms or -1, whether the attempt counts).
        self.failed: dict[tuple[int, str], list[tuple[int, Out, int, bool]]] = {}
        self._touched: dict[int, dict[int, Verb]] = {}
        # By channel: the numbers of records named too late, and of records that become dead.
        self.late: Counter[int] = Counter()
        self.died: Counter[int] = Counter()

    def settle(self, channel: Channel, steps: Sequence[Step]) -> tuple[Settled, list[tuple[int, Out, int]]]:
        """Apply acks, nacks, releases and extensions; return the answer, and (offset, out, ms) to extend."""
        touched = self._touched.setdefault(channel.id, {})
        extends: list[tuple[int, Out, int]] = []
        late: list[Named] = []
        done = 0
        for step in steps:
            named = step.named
            missed: list[int] = []
            for offset in range(named.first, named.end):
                out, before = channel.out.get(offset), touched.get(offset)
                if offset in channel.pins and step.verb != "extend":
                    missed.append(offset)  # its transaction decides about it
                elif out is not None and out.delivery == named.delivery and before is None:
                    done += 1
                    if step.verb == "extend":
                        extends.append((offset, out, step.timeout_ms or out.timeout_ms))
                    else:
                        touched[offset] = step.verb
                        self._end(channel, offset, out, step)
                elif step.verb == "ack" and _is_done(channel, offset, out, before):
                    done += 1
                else:
                    missed.append(offset)
            late += [
                Named(named.partition, first, first + count, named.delivery)
                for first, count in runs_of(missed)
            ]
            self.late[channel.id] += len(missed)
        return Settled(done, late), extends

    def overdue(self, channel: Channel, offset: int, out: Out) -> None:
        """Fail a delivery that has expired, unless a step in this turn has ended it."""
        touched = self._touched.setdefault(channel.id, {})
        if offset not in touched:
            touched[offset] = "nack"
            self._fail(channel, offset, out, None, TIME_OUT)

    def changes(self) -> list[Change]:
        """Return the collected changes in the form of log entries."""
        found: list[Change] = [
            Acknowledged(channel, spaced_runs(runs_of(sorted(acked))))
            for channel, acked in self.acked.items()
        ]
        for (channel, reason), items in self.failed.items():
            items.sort()
            flat: list[int] = []
            for distance, (_, _, delay_ms, counts) in zip(
                spaced(each[0] for each in items), items, strict=True
            ):
                flat += (distance, delay_ms, int(counts))
            found.append(Failed(channel, flat, reason))
        return found

    def _end(self, channel: Channel, offset: int, out: Out, step: Step) -> None:
        if step.verb == "ack":
            self.acked.setdefault(channel.id, {})[offset] = out
        elif step.verb == "release":
            self.failed.setdefault((channel.id, ""), []).append((offset, out, 0, False))
        else:
            self._fail(channel, offset, out, step.delay_ms, step.reason)

    def _fail(self, channel: Channel, offset: int, out: Out, delay_ms: int | None, reason: str) -> None:
        settings = channel.settings
        if delay_ms is None:
            delay_ms = settings.retry_delay_ms(out.attempt)
        if settings.max_attempts and out.attempt >= settings.max_attempts:
            delay_ms = -1
            self.died[channel.id] += 1
        reason = reason.encode()[:REASON_BYTES].decode(errors="ignore")
        self.failed.setdefault((channel.id, reason), []).append((offset, out, delay_ms, True))


def _is_done(channel: Channel, offset: int, out: Out | None, before: Verb | None) -> bool:
    """Return whether a record is done: acknowledged in this turn or before, or passed by a seek."""
    if before is not None:
        return before == "ack"
    return out is None and offset < channel.next and offset not in channel.aside
