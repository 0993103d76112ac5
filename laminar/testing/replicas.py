"""Digests of the committed logs of a topic's replicas, each requested from the replica's own shard.

The client would ask any replica. Here each answer must come from the replica itself, so each is asked by
plain HTTP with ``Laminar-Local: 1``, again until it answers. `laminar.testing.history.check_replicas` checks
whether the digests are equal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from laminar.testing.cluster import get_json
from laminar.testing.nodes import ServerFailed

Digests = dict[int, dict[str, str]]

_PAUSE_S = 0.1


def committed_digests(urls: Sequence[str], topic: str, *, timeout: float = 30.0) -> Digests:
    """Return partition -> node -> sha256 of the log up to a committed index that all replicas have.

    `urls` are nodes that are asked in turn for the places of the replicas.

    Raises:
        ServerFailed: `timeout` seconds have passed; the message names a replica that lags or does not answer.
    """
    deadline = time.monotonic() + timeout
    target = f"/v1/topics/{quote(topic, safe='')}/partitions"
    while True:
        answer = next(filter(None, (get_json(url + target) for url in urls)), None)
        missing = "no node says where the replicas are"
        if answer is not None:
            digests: Digests = {}
            missing = ""
            for partition in answer["partitions"]:
                number = int(partition["partition"])
                digests[number] = {}
                missing = missing or _digests_of(partition, f"{target}/{number}/digest", digests[number])
            if not missing:
                return digests
        if time.monotonic() >= deadline:
            raise ServerFailed(f"the replicas of {topic} have not come together in {timeout:g} s: {missing}")
        time.sleep(_PAUSE_S)


def _digests_of(partition: dict[str, Any], target: str, found: dict[str, str]) -> str:
    """Add to `found` each replica's digest up to the same index; return what is missing, "" if nothing is."""
    local = {"Laminar-Local": "1"}
    states = {}
    for replica in partition["replicas"]:
        state = get_json(f"{replica['url']}{target}", headers=local)
        if state is None:
            return f"{replica['node']} is silent about partition {partition['partition']}"
        states[replica["url"]] = state
    index = max(int(state["committed_index"]) for state in states.values())
    for url, state in states.items():
        state = get_json(f"{url}{target}?to_index={index}", headers=local)
        if state is None:
            return f"{url} has not committed entry {index} of partition {partition['partition']}"
        found[str(state["node"])] = str(state["digest"])
    return ""
