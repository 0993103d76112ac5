"""Digests of the committed logs of a topic's replicas, each requested from the replica's own shard.

The client would ask any replica. Here each answer must come from the replica itself, so each is asked by
plain HTTP with ``Laminar-Local: 1``, again until it answers. `laminar.testing.history.check_replicas` checks
whether the digests are equal.

A topic with many splits and merges has hundreds of partitions: several are asked about at once, and a
partition whose replicas have answered is not asked about again.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from laminar.testing.cluster import get_json
from laminar.testing.nodes import ServerFailed

Digests = dict[int, dict[str, str]]

_PAUSE_S = 0.1
_ANSWER_S = 5.0
# Partitions that are asked about at once.
_AT_ONCE = 8
# Most partitions that an error names.
_MOST_NAMED = 5


class _Missing(Exception):
    """Raised if a replica does not answer, or lags; the message says which one and why."""


def committed_digests(urls: Sequence[str], topic: str, *, timeout: float = 30.0) -> Digests:
    """Return partition -> node -> sha256 of the log up to a committed index that all replicas have.

    `urls` are nodes, which are asked in turn where the replicas are.

    Raises:
        ServerFailed: `timeout` seconds have passed; the message names replicas that lag or do not answer, and
            what they said last.
    """
    deadline = time.monotonic() + timeout
    target = f"/v1/topics/{quote(topic, safe='')}/partitions"
    found: Digests = {}
    why = {-1: "no node says where the replicas are"}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while True:
            answer = next(filter(None, (get_json(url + target) for url in urls)), None)
            if answer is not None:
                partitions = {int(each["partition"]): each for each in answer["partitions"]}
                asked = {number: each for number, each in partitions.items() if number not in found}
                answers = pool.map(lambda each: _digests_of(each, target, deadline), asked.values())
                why = {number: why.get(number, "not asked about in time") for number in asked}
                for number, each in zip(asked, answers, strict=True):
                    if isinstance(each, str):
                        why[number] = each
                    elif each is not None:
                        found[number] = each
                        del why[number]
                if not why:
                    return {number: found[number] for number in partitions}
            if time.monotonic() >= deadline:
                named = "; ".join(
                    f"partition {number}: {each}" for number, each in list(why.items())[:_MOST_NAMED]
                )
                raise ServerFailed(
                    f"the replicas of {topic} have not come together in {timeout:g} s, those of "
                    f"{len(found)} partitions have: {named}"
                )
            time.sleep(_PAUSE_S)


def _digests_of(partition: dict[str, Any], target: str, deadline: float) -> dict[str, str] | str | None:
    """Return the digests of a partition's replicas up to one index, by node.

    Return a text that says what is missing if a replica did not answer; None if `deadline` has passed.
    """
    if time.monotonic() >= deadline:
        return None
    path = f"{target}/{partition['partition']}/digest"
    try:
        states = {each["url"]: _ask(each["node"], each["url"] + path) for each in partition["replicas"]}
        index = max(int(state["committed_index"]) for state in states.values())
        digests = [_ask(state["node"], f"{url}{path}?to_index={index}") for url, state in states.items()]
    except _Missing as missing:
        return str(missing)
    return {str(each["node"]): str(each["digest"]) for each in digests}


def _ask(node: str, url: str) -> dict[str, Any]:
    """Return the JSON that the replica on `node` answers to a request of its digest.

    Raises:
        _Missing: the replica does not answer, or answers with an error.
    """
    request = urllib.request.Request(url, headers={"Laminar-Local": "1"})
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return dict(json.loads(answer.read()))
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        raise _Missing(f"{node} says {error.code} {said[:300]}") from error
    except (OSError, ValueError) as error:
        raise _Missing(f"{node} at {url}: {error}") from error
