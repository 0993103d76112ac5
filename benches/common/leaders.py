"""The leaders of a bench's topic: when they stay, where they are, and what is sent to each.

In the first seconds of a cluster a partition is led by whoever was elected first; the preferred leader takes
over when its node has been alive for `settle_ms`. Until then requests for a leader that has gone are passed
on between nodes, and leaderships move under the load. A bench waits for that to end, so that it measures the
same cluster in each run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from typing import Any
from urllib.parse import quote, urlsplit

from benches.common import loads
from laminar.aio import Client, Topic

PATIENCE_S = 60.0
_PAUSE_S = 0.2
QUICK = {"settle_ms": 500}
"""Settings of a cluster that is only to show that a bench runs."""


def shards_of(nodes: int) -> int:
    """Return the shards for each of `nodes` nodes on this machine: as many loops as CPUs, one at least."""
    return max(1, (os.cpu_count() or 1) // nodes)


async def settled(client: Client, topic: Topic[Any]) -> str:
    """Wait until each partition of `topic` is led by its preferred leader; return how they are spread.

    Raises:
        TimeoutError: They are not after `PATIENCE_S`.
    """
    until_s = time.monotonic() + PATIENCE_S
    while True:
        rows = await topic.partitions()
        moving = [row.partition for row in rows if not await _is_preferred(client, topic.name, row)]
        if not moving:
            break
        if time.monotonic() > until_s:
            raise TimeoutError(
                f"{topic.name}: partitions {moving} have no lasting leader after {PATIENCE_S:g} s"
            )
        await asyncio.sleep(_PAUSE_S)
    led = Counter(row.raw["leader"]["url"] for row in rows)
    return f"{len(rows)} partitions led by {len(led)} shards: {', '.join(map(str, sorted(led.values())))}"


async def _is_preferred(client: Client, topic: str, row: Any) -> bool:
    path = f"/v1/admin/topics/{quote(topic, safe='')}/partitions/{row.partition}"
    placement = await client.request_json("GET", path)
    leader = row.raw["leader"]
    return leader is not None and leader["node"] == placement["preferred_leader"]


async def posts_to(topic: Topic[Any], *, token: str = "") -> list[tuple[str, int, bytes]]:
    """Return for each partition the host and port of its leader's shard, and a POST of one record."""
    targets = []
    for row in await topic.partitions():
        url = urlsplit(row.raw["leader"]["url"])
        assert url.hostname is not None and url.port is not None, row.raw
        targets.append((url.hostname, url.port, loads.post_request(topic.name, row.partition, token=token)))
    return targets
