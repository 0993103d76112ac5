"""Refuse records with keys if the client chose their partition by an old version of the topic's route.

A producer that appends records with keys to a partition names the version of the topic's route by which it
chose the partition. A partition takes no keys that were routed by a version older than the partition: a newer
route may assign these keys to another partition, and no consumer would look for them here. A request without
a version counts as routed by route 0. No key is hashed for this check, and records without a key are not
checked. Reference: `docs/routes.md#producers`, rule `version`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from laminar.batch import Batch, Buffer, Header
from laminar.batch.columns import Column
from laminar.http.api.append_body import Append
from laminar.http.api.parameters import MAX_NUMBER
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.partition.deduplication import is_duplicate
from laminar.node.partition.partition import Partition
from laminar.node.routes.lineage import opened_in

ROUTE = "laminar-route"
NOT_SAID = -1
_NUMBER = re.compile(r"[0-9]{1,16}\Z", re.ASCII)


def route_said(headers: Mapping[str, str]) -> int:
    """Return the version of the route that a request names; `NOT_SAID` if it names none.

    Raises:
        Problem: 422 `invalid`.
    """
    text = headers.get(ROUTE)
    if text is None:
        return NOT_SAID
    if not _NUMBER.match(text) or int(text) > MAX_NUMBER:
        raise Problem(
            "invalid",
            "the version of a route must be a decimal number",
            field=ROUTE,
            value=text,
            limit=MAX_NUMBER,
            outcome="not_applied",
        )
    return int(text)


def has_keys(content: Records | Buffer) -> bool:
    """Return whether any of these records, or any record of a verified batch, has a key."""
    if isinstance(content, Records):
        return content.keys is not None and any(key is not None for key in content.keys)
    return Column.KEY in Batch(content, verified=True).columns


class StaleRoutes:
    """Refuses records by stale routes, for one shard.

    It knows routes by its view and its partitions' logs.
    """

    def __init__(self, topics: TopicLookup) -> None:
        self._topics = topics

    def matter(self, partition: Partition) -> bool:
        """Return whether requests for this partition need the check: not while its topic has route 0.

        A sealed partition needs none either: it takes no records at all, and its refusal names the next
        route.
        """
        succession = partition.state.succession
        if not self._topics.version(partition.topic) and not succession.opened_in:
            return False
        return succession.sealed is None

    def check_append(self, partition: Partition, append: Append, said: int) -> None:
        """Refuse an append with keys whose route version `said` is too old.

        Batches that are already in the log, which are recognised as retries, are not refused.

        Raises:
            Problem: 409 `stale_route`.
        """
        new: list[Records | Buffer] = [
            frame for frame in append.frames if not is_duplicate(partition.context, Header.unpack(frame))
        ]
        if append.records is not None:
            new.append(append.records)
        if any(map(has_keys, new)):
            self.check(partition, said)

    def check(self, partition: Partition, said: int) -> None:
        """Refuse records with keys that were routed by version `said`, if that is older than the partition.

        The check is right with an old view, too: the version that opened a partition never changes, and the
        partition's own log has it in any case.

        Raises:
            Problem: 409 `stale_route`.
        """
        topic = partition.topic
        present = self._topics.version(topic)
        oldest = partition.state.succession.opened_in
        if present:
            oldest = max(oldest, opened_in(self._topics.record(topic), partition.number))
        present = max(present, oldest)
        if present == 0 or (said != NOT_SAID and said >= oldest):
            return
        detail = f"{partition.context.name} was chosen for these keys by route {said} of {topic}"
        if said == NOT_SAID:
            detail = (
                f"{topic} has route {present}: records with keys name the route by which they were placed"
            )
        raise Problem(
            "stale_route",
            detail,
            field=ROUTE,
            value=None if said == NOT_SAID else said,
            limit=present,
            outcome="not_applied",
        )
