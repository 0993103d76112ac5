"""The choice of the node for a request, as pure objects: leaders, replicas and nodes.

`TopicMap` has a topic's route, and the leader and the replicas of each of its partitions; `Balancer` chooses
among replicas and nodes; `SessionOffsets` has how far this client has seen each partition, so that a later
read does not return an older state. None of them reads a clock or a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laminar.wire.key_route import Route


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of a partition: its node, and the URL of the shard that owns it there."""

    node: str
    url: str
    reachable: bool = True


@dataclass(slots=True)
class Place:
    """The replicas of one partition; ``leader`` is the URL of the leader, None while it is not known."""

    replicas: tuple[Replica, ...] = ()
    leader: str | None = None


MAP_AGE_MS = 10_000


@dataclass(slots=True)
class TopicMap:
    """The leaders and replicas of all partitions of a topic, as last received; numbers may have gaps.

    `route` says which partitions take which keys, `created_with` how many there were at the topic's creation.
    `stale` is true if the map proved wrong, so that it is to be requested again.
    """

    route: Route
    places: dict[int, Place] = field(default_factory=dict)
    created_with: int = 0
    stale: bool = False
    refreshed_at_ms: int = 0

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any], *, now_ms: int) -> TopicMap:
        """Return the map in an answer of ``GET /v1/topics/{t}/partitions``.

        As leader it has the URL of the shard that owns the replica, if the answer names it, else that of the
        node, which may lead to any shard.
        """
        places: dict[int, Place] = {}
        for row in sorted(answer["partitions"], key=lambda row: int(row["partition"])):
            replicas = tuple(
                Replica(str(each["node"]), each["url"].rstrip("/"), bool(each.get("reachable", True)))
                for each in row.get("replicas", ())
                if each.get("url")
            )
            leader = row.get("leader") or {}
            own = [replica.url for replica in replicas if replica.node == leader.get("node")]
            url = own[0] if own else leader.get("url")
            places[int(row["partition"])] = Place(replicas, url.rstrip("/") if url else None)
        version = int(answer.get("route") or 0)
        # A node of an older program lists no ranges; it knows topics of route 0 only.
        route = Route.of_ranges(version, answer["ranges"]) if version else Route.even(len(places))
        return cls(route, places, int(answer.get("created_with", len(places))), refreshed_at_ms=now_ms)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all partitions, rising."""
        return tuple(self.places)

    def aged(self, *, now_ms: int) -> bool:
        """Return whether the map should be requested again in the background: a replica may be back."""
        return now_ms - self.refreshed_at_ms >= MAP_AGE_MS

    def leader(self, partition: int) -> str | None:
        """Return the URL of the partition's leader, None if it is not known."""
        return self.places[partition].leader if partition in self.places else None

    def learn_leader(self, partition: int, url: str) -> None:
        """Note that a redirect named `url` as the partition's leader."""
        if partition in self.places:
            self.places[partition].leader = url.rstrip("/")

    def forget_leader(self, partition: int, url: str) -> None:
        """Note that `url` does not lead `partition`, or not any more; the map becomes stale.

        If the map names another leader by now, nothing changes.
        """
        if partition in self.places and self.places[partition].leader not in (url, None):
            return
        if partition in self.places:
            self.places[partition].leader = None
        self.stale = True

    def forget_leaders(self, urls: Callable[[str], bool]) -> bool:
        """Forget each leader for whose URL `urls` returns true; return whether there was one."""
        found = [each for each in self.places.values() if each.leader is not None and urls(each.leader)]
        for place in found:
            place.leader = None
        return bool(found)

    def elsewhere(self, avoid: Iterable[str]) -> list[str]:
        """Return the URLs of replicas that are not on the nodes of the URLs in `avoid`, sorted.

        Other shards of these nodes are left out too: the shards of a node often fail together.
        """
        avoided = set(avoid)
        replicas = {replica for place in self.places.values() for replica in place.replicas}
        nodes = {replica.node for replica in replicas if replica.url in avoided}
        return sorted(replica.url for replica in replicas if replica.node not in nodes)

    def replicas(self, partition: int) -> tuple[Replica, ...]:
        """Return the partition's replicas; () if the map does not have the partition."""
        return self.places[partition].replicas if partition in self.places else ()


def newest_route(answer: Mapping[str, Any]) -> Route:
    """Return the present route of a topic from the answer of ``GET /v1/topics/{t}/routes``.

    Raises:
        ValueError: the route is malformed, or of a kind that this version cannot read.
    """
    return Route.from_answer(max(answer["routes"], key=lambda each: int(each["version"])))


@dataclass(slots=True)
class Load:
    """Counts of the requests to one URL; ``latency_us`` is a moving mean, 0 while unknown.

    ``avoided_until_ms`` is the time until which other endpoints are preferred, because this one failed.
    """

    outstanding: int = 0
    latency_us: float = 0.0
    chosen_at: int = 0  # a count of choices, not a time
    avoided_until_ms: int = 0
    requests: int = 0
    failures: int = 0


AVOID_MS = 1_000


class Balancer:
    """A chooser of the endpoint with the fewest outstanding requests, then the least latency.

    Latencies with the same power of two count as equal, and equal endpoints take turns: otherwise a replica
    that was faster once by a microsecond would get every read.
    """

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        self._choices = 0

    def choose(self, urls: Iterable[str], *, now_ms: int) -> str | None:
        """Return the best of `urls`, None if there is none; one that failed lately only if all have."""
        best: tuple[bool, int, int, int] | None = None
        chosen: str | None = None
        for url in urls:
            load = self.loads.setdefault(url, Load())
            rank = (
                load.avoided_until_ms > now_ms,
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

    def is_avoided(self, url: str, *, now_ms: int) -> bool:
        """Return whether `url` failed less than `AVOID_MS` ago."""
        load = self.loads.get(url)
        return load is not None and load.avoided_until_ms > now_ms

    def avoided(self, *, now_ms: int) -> list[str]:
        """Return the endpoints that failed less than `AVOID_MS` ago."""
        return [url for url, load in self.loads.items() if load.avoided_until_ms > now_ms]

    def started(self, url: str) -> None:
        """Count a request that is sent to `url`."""
        load = self.loads.setdefault(url, Load())
        load.outstanding += 1
        load.requests += 1

    def finished(self, url: str, *, latency_us: float | None) -> None:
        """Count an answer of `url`. After a long poll `latency_us` is None: it was not measured."""
        load = self.loads[url]
        assert load.outstanding > 0, f"{url} finished more often than it started"
        load.outstanding -= 1
        load.avoided_until_ms = 0
        if latency_us is not None:
            known = load.latency_us
            load.latency_us = latency_us if known == 0.0 else known + (latency_us - known) * 0.2

    def failed(self, url: str, *, now_ms: int, started: bool = True) -> None:
        """Count a request that got no answer, or was refused for a reason that concerns this node only.

        Other endpoints are preferred for `AVOID_MS`. `started` is false if `finished` was called, or no
        request was counted.
        """
        load = self.loads.setdefault(url, Load())
        if started:
            assert load.outstanding > 0, f"{url} failed more often than it started"
            load.outstanding -= 1
        load.failures += 1
        load.avoided_until_ms = now_ms + AVOID_MS


def readers(
    replicas: Sequence[Replica], leader: str | None, *, from_leader: bool, only: int | None = None
) -> list[str]:
    """Return the URLs that may answer a read: the leader's, or those of all reachable replicas.

    If no replica is reachable, all of them are returned. With `only` it is the replica of that number, from
    0, in the order of the nodes' names; none if there are fewer. Replicas that lag are included: under load
    almost all lag a little, and a replica that lacks the requested ``min_offset`` refuses the read itself.
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
    """The offsets up to which this client has seen each partition, so that reads contain its own writes.

    A fetch from a replica carries the offset after the last one seen as ``min_offset``. A replica that has
    not reached it waits or refuses, so it does not answer with older data.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], int] = {}

    def advance(self, topic: str, partition: int, next_offset: int) -> None:
        """Note that this client has seen a record before `next_offset`, or has appended it."""
        key = (topic, partition)
        if next_offset > self._next.get(key, 0):
            self._next[key] = next_offset

    def next_offset(self, topic: str, partition: int) -> int:
        """Return the offset after the last one seen; 0 if none was."""
        return self._next.get((topic, partition), 0)

    def forget(self, topic: str) -> None:
        """Forget a topic that was deleted: a new one of the same name begins at 0."""
        for key in [key for key in self._next if key[0] == topic]:
            del self._next[key]
