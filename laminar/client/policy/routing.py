"""Where a request goes: leaders, replicas and nodes, as pure objects.

`TopicMap` remembers which nodes lead a topic's partitions and which hold their replicas; `Balancer` chooses
among replicas and nodes; `SessionOffsets` remembers how far each partition was seen, so that no read goes
back in time. None of them reads a clock or a socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of a partition: its node, and the URL of the shard that owns it there."""

    node: str
    url: str
    reachable: bool = True


@dataclass(slots=True)
class Place:
    """Replicas of one partition. ``leader`` is a URL, or None while no leader is known."""

    replicas: tuple[Replica, ...] = ()
    leader: str | None = None


MAP_AGE_MS = 10_000


@dataclass(slots=True)
class TopicMap:
    """Places of all partitions of a topic, as last received."""

    places: list[Place] = field(default_factory=list)
    stale: bool = False
    heard_at_ms: int = 0

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any], *, now_ms: int) -> TopicMap:
        """Read ``GET /v1/topics/{t}/partitions``.

        The leader's URL is that of its own replica (the owning shard) where the answer has it: the node's
        common port would reach any shard.
        """
        places: list[Place] = []
        for row in sorted(answer["partitions"], key=lambda row: int(row["partition"])):
            replicas = tuple(
                Replica(str(each["node"]), each["url"].rstrip("/"), bool(each.get("reachable", True)))
                for each in row.get("replicas", ())
                if each.get("url")
            )
            leader = row.get("leader") or {}
            own = [replica.url for replica in replicas if replica.node == leader.get("node")]
            url = own[0] if own else leader.get("url")
            places.append(Place(replicas, url.rstrip("/") if url else None))
        return cls(places, heard_at_ms=now_ms)

    def aged(self, *, now_ms: int) -> bool:
        """Return whether it is time to ask again in the background: a replica may have come back."""
        return now_ms - self.heard_at_ms >= MAP_AGE_MS

    def leader(self, partition: int) -> str | None:
        """Return the URL of the partition's leader, None if it is not known."""
        return self.places[partition].leader if partition < len(self.places) else None

    def learn_leader(self, partition: int, url: str) -> None:
        """Note that a redirect named `url` as leader."""
        if partition < len(self.places):
            self.places[partition].leader = url.rstrip("/")

    def forget_leader(self, partition: int, url: str) -> None:
        """Note that `url` does not lead `partition` (any more).

        A newer leader is kept, and the map with it.
        """
        if partition < len(self.places) and self.places[partition].leader not in (url, None):
            return
        if partition < len(self.places):
            self.places[partition].leader = None
        self.stale = True

    def elsewhere(self, avoid: Iterable[str]) -> list[str]:
        """Return URLs of replicas on other nodes than those of `avoid`.

        A node's shards often fail together.
        """
        avoided = set(avoid)
        replicas = {replica for place in self.places for replica in place.replicas}
        nodes = {replica.node for replica in replicas if replica.url in avoided}
        return sorted(replica.url for replica in replicas if replica.node not in nodes)

    def replicas(self, partition: int) -> tuple[Replica, ...]:
        """Return the partition's replicas."""
        return self.places[partition].replicas if partition < len(self.places) else ()


@dataclass(slots=True)
class Load:
    """State of an endpoint. ``latency_us`` is a moving mean, 0 while unknown."""

    outstanding: int = 0
    latency_us: float = 0.0
    chosen_at: int = 0  # a count of choices, not a time
    rests_until_ms: int = 0
    requests: int = 0
    failures: int = 0


REST_MS = 1_000


class Balancer:
    """Chooses the endpoint with the least outstanding requests, then the least latency.

    Latencies within a factor of two count as equal, and equals take turns: otherwise the
    replica that was faster once by a microsecond would get every read.
    """

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        self._choices = 0

    def choose(self, urls: Iterable[str], *, now_ms: int) -> str | None:
        """Return the best of `urls`; one that failed lately only if all did; None if there is none."""
        best: tuple[bool, int, int, int] | None = None
        chosen: str | None = None
        for url in urls:
            load = self.loads.setdefault(url, Load())
            rank = (
                load.rests_until_ms > now_ms,
                load.outstanding,
                int(load.latency_us).bit_length(),
                load.chosen_at,
            )
            if best is None or rank < best:
                best, chosen = rank, url
        if chosen is not None:
            self._choices += 1
            self.loads[chosen].chosen_at = self._choices
        return chosen

    def rests(self, url: str, *, now_ms: int) -> bool:
        """Return whether `url` failed less than `REST_MS` ago."""
        load = self.loads.get(url)
        return load is not None and load.rests_until_ms > now_ms

    def resting(self, *, now_ms: int) -> list[str]:
        """Return the endpoints that failed less than `REST_MS` ago."""
        return [url for url, load in self.loads.items() if load.rests_until_ms > now_ms]

    def started(self, url: str) -> None:
        """Count a request to `url`."""
        load = self.loads.setdefault(url, Load())
        load.outstanding += 1
        load.requests += 1

    def finished(self, url: str, *, latency_us: float | None) -> None:
        """Count an answer. `latency_us` is None where the server waited on purpose (a long poll)."""
        load = self.loads[url]
        assert load.outstanding > 0, f"{url} finished more often than it started"
        load.outstanding -= 1
        load.rests_until_ms = 0
        if latency_us is not None:
            known = load.latency_us
            load.latency_us = latency_us if known == 0.0 else known + (latency_us - known) * 0.2

    def failed(self, url: str, *, now_ms: int, started: bool = True) -> None:
        """Count a request without an answer, or one that says: not here, not now.

        Other endpoints are preferred for `REST_MS`.
        """
        load = self.loads.setdefault(url, Load())
        if started:
            assert load.outstanding > 0, f"{url} failed more often than it started"
            load.outstanding -= 1
        load.failures += 1
        load.rests_until_ms = now_ms + REST_MS


def readers(
    replicas: Sequence[Replica], leader: str | None, *, from_leader: bool, only: int | None = None
) -> list[str]:
    """Return the URLs that may answer a read: the leader's, or those of all reachable replicas.

    Of all replicas if none is reachable. With `only` the replica of that number, in the order of their nodes'
    names, and none if there are fewer. Whether a replica is in sync is not asked: under load hardly one is at
    the instant of asking, and ``min_offset`` keeps one that is behind from answering.
    """
    if only is not None:
        by_node = sorted(replicas, key=lambda replica: replica.node)
        return [replica.url for replica in by_node[only : only + 1]]
    if from_leader:
        return [leader] if leader else []
    reachable = [replica.url for replica in replicas if replica.reachable]
    found = reachable or [replica.url for replica in replicas]
    if not found and leader:
        return [leader]
    return found


class SessionOffsets:
    """How far this client has seen each partition, as the next offset: the basis of read-your-writes.

    Every read carries it as ``min_offset``, so that a replica that has not reached it waits or declines
    instead of answering with older data.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], int] = {}

    def advance(self, topic: str, partition: int, next_offset: int) -> None:
        """Note that the partition was seen up to `next_offset`."""
        key = (topic, partition)
        if next_offset > self._next.get(key, 0):
            self._next[key] = next_offset

    def next_offset(self, topic: str, partition: int) -> int:
        """Return the offset after the last one seen; 0 if none was."""
        return self._next.get((topic, partition), 0)

    def forget(self, topic: str) -> None:
        """Forget a topic that was deleted; another of the same name begins at 0."""
        for key in [key for key in self._next if key[0] == topic]:
            del self._next[key]
