"""The descriptions that the client returns of topics, partitions, routes, channels, cursors and sinks.

Each is made of the JSON of an answer. Those with `raw` keep all of it, also what this client does not know.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicInfo:
    """A topic's description, from ``GET /v1/topics/{t}``. ``raw`` is the whole answer."""

    topic: str
    partitions: int
    replicas: int
    settings: Mapping[str, Any]
    route: int
    raw: Mapping[str, Any]

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> TopicInfo:
        """Return the description in an answer of ``GET /v1/topics/{t}``."""
        return cls(
            topic=str(answer["topic"]),
            partitions=int(answer["partitions"]),
            replicas=int(answer.get("replicas", 0)),
            settings=cast("Mapping[str, Any]", answer.get("settings") or {}),
            route=int(answer.get("route", 0)),
            raw=answer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionInfo:
    """One partition of a topic, from ``GET /v1/topics/{t}/partitions``.

    `start_offset` is the first offset that is kept, `end_offset` the offset after the last committed record.
    """

    partition: int
    leader: str | None
    replicas: tuple[str, ...]
    in_sync: int
    start_offset: int
    end_offset: int
    term: int
    raw: Mapping[str, Any]

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> PartitionInfo:
        """Return the partition that one row of the answer describes."""
        replicas = answer.get("replicas") or ()
        return cls(
            partition=int(answer["partition"]),
            leader=(answer.get("leader") or {}).get("node"),
            replicas=tuple(str(each["node"]) for each in replicas),
            in_sync=sum(1 for each in replicas if each.get("in_sync", True)),
            start_offset=int(answer.get("start_offset") or 0),
            end_offset=int(answer.get("end_offset") or 0),
            term=int(answer.get("term") or 0),
            raw=answer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteInfo:
    """The route of a topic, from ``GET /v1/topics/{t}/routes``.

    Keys are hashed to 65,536 *logical partitions*. `ranges` has by partition the logical partitions whose
    records it takes. `ends` has, for each partition that takes no more records, its final end offset.
    `changing` is the version of the next route while a split, merge or move is under way, else None.
    """

    version: int
    ranges: Mapping[int, range]
    ends: Mapping[int, int]
    changing: int | None
    raw: Mapping[str, Any]

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> RouteInfo:
        """Return the route in an answer of ``GET /v1/topics/{t}/routes``."""
        (route,) = answer["routes"]
        change = answer.get("change")
        changes = [*answer.get("changes", ()), *([change] if change else [])]
        return cls(
            version=int(route["version"]),
            ranges={
                int(held["partition"]): range(int(held["from"]), int(held["to"])) for held in route["ranges"]
            },
            ends={
                int(held["partition"]): int(held["end"])
                for each in changes
                for held in each["inputs"]
                if held["end"] is not None
            },
            changing=int(change["version"]) if change else None,
            raw=answer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelInfo:
    """A channel: its settings, and counts of its records in the partitions whose leaders answered.

    `settings` leaves out settings that have their default. `depth` is an upper bound of the number of records
    still to be given out. `out` is the number of records that consumers have at the moment; `pinned` of these
    wait for a transaction that acknowledges them. `aside` is the number of records that wait for their next
    attempt, `dead` of those that failed for good and wait for an operator, `lost` of those that were trimmed
    before they were acknowledged. `oldest_age_s` is the age of the oldest record that is neither acknowledged
    nor dead. If `blocked` is true, too many records are out or aside, so that no new ones are given out.
    `kept_bytes` is the number of bytes in the log that are kept only because channels still need them.
    `opening` are the partitions in which the channel is not open yet; `unanswered` those whose leaders did
    not answer.
    """

    channel: str
    id: int
    version: int
    settings: Mapping[str, Any]
    depth: int
    out: int
    pinned: int
    aside: int
    dead: int
    lost: int
    oldest_age_s: float | None
    blocked: bool
    kept_bytes: int
    opening: Sequence[int]
    unanswered: Sequence[int]
    raw: Mapping[str, Any]

    @property
    def paused(self) -> bool:
        """Whether the channel is paused, so that nothing is given out."""
        return bool(self.settings.get("paused", False))

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> ChannelInfo:
        """Return the channel that the JSON of an answer describes."""
        oldest = answer.get("oldest_age_ms")
        return cls(
            channel=str(answer["channel"]),
            id=int(answer["id"]),
            version=int(answer["version"]),
            settings=dict(answer["settings"]),
            depth=int(answer["depth"]),
            out=int(answer["out"]),
            pinned=int(answer.get("pinned", 0)),
            aside=int(answer["aside"]),
            dead=int(answer["dead"]),
            lost=int(answer["lost"]),
            oldest_age_s=None if oldest is None else oldest / 1000,
            blocked=bool(answer["blocked"]),
            kept_bytes=int(answer.get("kept_bytes", 0)),
            opening=list(answer["opening"]),
            unanswered=list(answer["unanswered"]),
            raw=answer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AsideInfo:
    """A record of a channel that is aside: it waits for its next attempt, or is dead.

    `attempts` is the number of failed attempts, `reason` the reason of the last one. `time` (RFC 3339) is the
    time of the next attempt, or when the record became dead. With `waits_for_key` the record was not tried
    and has no time: an earlier record of its key goes first. `token` names the record for `Channel.replay`
    and `Channel.drop`; `Topic.open` reads its value. If `unreadable` is true the leader could not read the
    record, and `key` and `tag` are not known.
    """

    partition: int
    offset: int
    token: str
    attempts: int
    time: str | None
    waits_for_key: bool
    reason: str
    key: bytes | None = None
    tag: str | None = None
    unreadable: bool = False

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> AsideInfo:
        """Return the record that one row of a list of records aside or dead describes."""
        key = answer["key"].encode() if "key" in answer else None
        return cls(
            partition=int(answer["partition"]),
            offset=int(answer["offset"]),
            token=str(answer["token"]),
            attempts=int(answer["attempts"]),
            time=None if answer["waits_for_key"] else str(answer["at"]),
            waits_for_key=bool(answer["waits_for_key"]),
            reason=str(answer["reason"]),
            key=base64.b64decode(answer["key_base64"]) if "key_base64" in answer else key,
            tag=answer.get("tag"),
            unreadable=bool(answer.get("unreadable", False)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorInfo:
    """A cursor: by partition its position, its lag in records, and its owner.

    `overtaken_by` has, for partitions in which records were trimmed before the cursor passed them, the number
    of these records; `lag` includes them. `owners` has the members of a group that own partitions; `changed`
    is the time of the last move. `waits_for` has the partitions that may not be read yet, because they
    replaced others: for each, the partitions that the cursor must finish first, with their ends.
    """

    cursor: str
    positions: Mapping[int, int]
    lag: Mapping[int, int]
    owners: Mapping[int, str]
    overtaken_by: Mapping[int, int]
    waits_for: Mapping[int, Mapping[int, int]]
    changed: str
    raw: Mapping[str, Any]

    @property
    def overtaken(self) -> bool:
        """Whether records were trimmed before the cursor passed them."""
        return bool(self.overtaken_by)

    @property
    def total_lag(self) -> int:
        """Number of records between the cursor and the ends of all partitions."""
        return sum(self.lag.values())

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> CursorInfo:
        """Return the cursor that the JSON of an answer describes."""

        def by_partition(name: str) -> dict[int, Any]:
            return {int(number): value for number, value in (answer.get(name) or {}).items()}

        return cls(
            cursor=str(answer["cursor"]),
            positions=by_partition("positions"),
            lag=by_partition("lag"),
            owners=by_partition("owners"),
            overtaken_by=by_partition("overtaken_by"),
            waits_for={
                number: {int(before): int(end) for before, end in ends.items()}
                for number, ends in by_partition("waits_for").items()
            },
            changed=str(answer.get("changed", "")),
            raw=answer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trimmed:
    """The result of `Topic.delete_before`: it removed `deleted` records from `from_offset` on.

    `start_offset` is the first offset that is kept. It is the first one of a batch, so it may be before the
    requested offset. `held_back_by` are nodes whose replicas have not received all of the records yet: these
    records are kept for them.
    """

    partition: int
    deleted: int
    from_offset: int
    start_offset: int
    dry_run: bool
    held_back_by: tuple[str, ...]

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Trimmed:
        """Return the result in the answer to a trim."""
        return cls(
            partition=int(answer["partition"]),
            deleted=int(answer["deleted"]),
            from_offset=int(answer["from_offset"]),
            start_offset=int(answer["start_offset"]),
            dry_run=bool(answer["dry_run"]),
            held_back_by=tuple(str(node) for node in answer.get("held_back_by") or ()),
        )


class SinkInfo(NamedTuple):
    """A sink's description, from ``GET /v1/sinks/{sink}``.

    `committed` is the number of the last committed batch, None before the first; `fingerprint` is the text
    that its writer gave for it, "" for none. `publishing` says that not all partitions show the batch yet.
    `once` says that the sink is a single-use one, which the cluster forgets some time after its batch.
    `changed` is the time when the sink was last begun or committed. `deleting` says that its deletion has
    begun and is not finished.
    """

    sink: str
    epoch: int
    committed: int | None
    publishing: bool
    fingerprint: str = ""
    once: bool = False
    changed: str = ""
    deleting: bool = False

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> SinkInfo:
        """Return the sink that the JSON of an answer describes."""
        committed = answer["committed"]
        return cls(
            str(answer["sink"]),
            int(answer["epoch"]),
            None if committed is None else int(committed),
            bool(answer["publishing"]),
            str(answer.get("fingerprint") or ""),
            bool(answer.get("once")),
            str(answer.get("changed") or ""),
            bool(answer.get("deleting")),
        )
