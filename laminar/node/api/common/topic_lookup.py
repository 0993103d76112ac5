"""Look up the catalog's records of topics and partitions that requests name, or answer 404."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from laminar.http.api.parameters import IMPORT
from laminar.http.api.problems import Problem
from laminar.node.runtime.cluster_view import View, ViewMessage
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route
from membership.records import (
    PartitionRecord,
    RouteRecord,
    Setting,
    TopicRecord,
)

# The header that names the import that a request belongs to, as requests have it; and the topic's setting.
_IMPORT = IMPORT.name.lower()
_IMPORTING = "importing"
# Routes beyond the first that are kept made.
MOST_ROUTES = 1024


class _Facts(NamedTuple):
    """The facts about a topic that nearly every request needs.

    They are its record, the `version` of its present route, and the import that fills it, or None.
    `partitions` has the records of partitions that were looked up, by number.
    """

    record: TopicRecord
    version: int
    importing: Setting | None
    partitions: dict[int, PartitionRecord]


class TopicLookup:
    """Looks up records of topics and partitions by name in this shard's view (its copy of the catalog)."""

    def __init__(self, view: View) -> None:
        self._view = view
        # By topic the decoded route, and the record from which it was decoded.
        self._routes: dict[str, tuple[RouteRecord, Route]] = {}
        # By topic the facts that nearly every request needs, as long as the view has this message.
        self._facts: dict[str, _Facts] = {}
        self._facts_of: ViewMessage | None = None

    def record(self, topic: str) -> TopicRecord:
        """Return the catalog's record of a topic, from this shard's view.

        Raises:
            Problem: 404 `no_such_topic`; 503 `not_ready` while the view may be too old to know that.
        """
        return self._known(topic).record

    def _known(self, topic: str) -> _Facts:
        """Return the facts about a topic. Raises as `record`."""
        facts = self._facts_about(topic)
        if facts is None:
            self._check_certain(f"topic {topic!r}")
            raise Problem("no_such_topic", f"there is no topic {topic!r}", field="topic", value=topic)
        return facts

    def knows(self, topic: str, partition: str | None = None) -> bool:
        """Return whether the view has this topic and, if it exists, this partition.

        A view may be old: then it lacks newer topics, and partitions with higher numbers. A number below the
        highest one is known, also that of a reclaimed partition, because numbers are never reused.
        """
        record = self._view.topics().get(topic)
        if record is None:
            return False
        if partition is None or not (partition.isascii() and partition.isdigit() and len(partition) <= 9):
            return True
        return int(partition) < (record.next_partition or record.partitions)

    def check_import(self, topic: str, headers: Mapping[str, str]) -> None:
        """Refuse a request for a topic that is being imported, unless its header names that import.

        Raises:
            Problem: 503 `being_created`; 412 `precondition_failed` for an import that is not under way.
        """
        facts, said = self._facts_about(topic), headers.get(_IMPORT)
        now = None if facts is None else facts.importing
        if now == said:
            return
        if said is None:
            raise Problem(
                "being_created",
                f"topic {topic!r} is being imported; it takes requests when the import is done",
                retry_after_ms=1_000,
                outcome="not_applied",
            )
        raise Problem(
            "precondition_failed",
            f"topic {topic!r} is not being filled by this import",
            field=_IMPORT,
            value=said,
            limit=now,
            outcome="not_applied",
        )

    def _check_certain(self, what: str) -> None:
        """Raise 503 `not_ready` while this node has not heard from the catalog since its start.

        Its copy of the catalog may be old until then. A client takes 404 for final, and may discard records.
        """
        if not self._view.is_confirmed:
            raise Problem(
                "not_ready",
                f"this node does not know {what}, and has not heard from the catalog since its start",
                outcome="not_applied",
            )

    def partition_record(self, topic: str, number: str) -> PartitionRecord:
        """Return the catalog's record of a partition, from this shard's view.

        Raises:
            Problem: 404 `no_such_topic` or `no_such_partition`; 503 `not_ready` while the view may be too old
                to know that.
        """
        facts = self._known(topic)
        is_number = number.isascii() and number.isdigit() and len(number) <= 9
        found = facts.partitions.get(int(number)) if is_number else None
        if found is None and is_number:
            found = self._view.partition(topic, int(number))
            if found is None:
                self._check_certain(f"{topic}/{number}")
            else:
                facts.partitions[found.number] = found
        if found is None:
            numbers = facts.record.numbers
            last = numbers[-1]
            detail = f"topic {topic!r} has partitions 0 to {last}"
            if len(numbers) <= last:
                detail = f"topic {topic!r} has {len(numbers)} partitions of numbers up to {last}"
            raise Problem(
                "no_such_partition",
                detail,
                field="partition",
                value=number,
                limit=last,
            )
        return found

    def version(self, topic: str) -> int:
        """Return the version of a topic's present route; 0 also if there is no such topic."""
        facts = self._facts_about(topic)
        return 0 if facts is None else facts.version

    def _facts_about(self, topic: str) -> _Facts | None:
        """Return the facts about a topic in the present view; None if it has no such topic."""
        message = self._view.message
        if message is not self._facts_of:
            self._facts_of, self._facts = message, {}
        facts = self._facts.get(topic)
        if facts is None:
            record = self._view.topics().get(topic)
            if record is None:
                return None  # not kept: requests may name any number of topics
            version = 0 if record.route is None else record.route.version
            facts = self._facts[topic] = _Facts(record, version, record.settings.get(_IMPORTING), {})
        return facts

    def route(self, record: TopicRecord) -> Route:
        """Return a topic's present route."""
        if record.route is None:
            return Route.even(record.partitions)
        known = self._routes.get(record.name)
        if known is None or known[0] is not record.route:
            ranges = record.route.ranges
            bounds = [*(each.first for each in ranges), LOGICAL_PARTITIONS]
            if len(self._routes) >= MOST_ROUTES:
                self._routes.clear()
            made = Route(record.route.version, bounds, [each.number for each in ranges])
            known = self._routes[record.name] = (record.route, made)
        return known[1]
