"""What a load did and was told: the facts that a disk after a crash is compared with.

The record at offset o of log L (its n-th life under that name) is a function of (L, n, o), so a reader knows
what each must be. Times are of CLOCK_MONOTONIC in ns, the clock of the recorder.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

Doing = Literal["create", "delete", "append", "trim", "policy", "synced", "told"]


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """`ended` is None for what was not answered.

    create, delete: of `life`. append: offsets from `offset` up to `stop`. trim: records before `offset` may
    go from `began` on; the log begins at `stop` when it has ended. policy: `interval`. synced: the log said
    that all before `stop` is synced. told: a reader was shown all before `stop`.
    """

    doing: Doing
    log: str
    life: int
    began: int
    ended: int | None
    offset: int = 0
    stop: int = 0
    interval: bool = False


def value(log: str, life: int, offset: int) -> bytes:
    """The record at that offset: 20 bytes to 3 KiB, none of them all zeros."""
    seed = hashlib.blake2b(f"{log} {life} {offset}".encode(), digest_size=16).digest()
    size = 20 + int.from_bytes(seed[:2], "big") % (3000 if seed[2] < 40 else 200)
    return (seed.hex().encode() * (size // 32 + 1))[:size]


class Diary:
    """Collects the acts of a load; `save` when it is over."""

    def __init__(self) -> None:
        self.acts: list[Act] = []

    def now(self) -> int:
        return time.monotonic_ns()

    def save(self, file: Path) -> None:
        file.write_bytes(msgspec.json.encode(self.acts))


def load(file: Path) -> list[Act]:
    return msgspec.json.decode(file.read_bytes(), type=list[Act])


class Promised(msgspec.Struct):
    """What one log must hold after a crash at some instant."""

    life: int = 0
    # Whether a log of this life must be there; may be there.
    must: bool = False
    may: bool = False
    # It begins at or after `lowest`, and at or before `highest`.
    lowest: int = 0
    highest: int = 0
    # All before it must be there: after a kill, and after a loss of power.
    kept: int = 0
    durable: int = 0
    # All before it may be there.
    tried: int = 0
    # Whether it ever had the policy `interval` in this life.
    interval: bool = False


def promised(acts: Iterable[Act], at: int) -> dict[str, Promised]:
    """By log, what was promised at the instant `at`."""
    found: dict[str, Promised] = {}
    unsynced: dict[str, bool] = {}
    for act in sorted(acts, key=lambda act: act.began):
        if act.began > at:
            break
        sure = act.ended is not None and act.ended <= at
        log = found.setdefault(act.log, Promised())
        match act.doing:
            case "create":
                found[act.log] = Promised(life=act.life, must=sure, may=True)
                unsynced[act.log] = False
            case "delete":
                log.must = False
                log.may = log.may and not sure
            case "append":
                log.tried = max(log.tried, act.stop)
                if sure:
                    log.kept = max(log.kept, act.stop)
                    if not unsynced[act.log]:
                        log.durable = max(log.durable, act.stop)
            case "trim":
                log.highest = max(log.highest, act.offset)
                if sure:
                    log.lowest = max(log.lowest, act.stop)
            case "policy":
                if act.interval:
                    log.interval = unsynced[act.log] = True
                elif sure:
                    unsynced[act.log] = False
                    log.durable = log.kept
            case "synced":
                log.durable = max(log.durable, act.stop)
            case "told":
                log.kept = max(log.kept, act.stop)
                if not unsynced[act.log]:
                    log.durable = max(log.durable, act.stop)
    return found
