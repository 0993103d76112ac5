"""The set-up of a load: the topic that it creates or uses, and a description of cluster and client."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

from laminar.cli.errors import UsageError

if TYPE_CHECKING:
    from laminar.client.sync.client import Client


def make(
    client: Client, topic: str, *, partitions: int, replicas: int | None, settings: dict[str, Any]
) -> None:
    """Create the topic of a load. An existing one is refused: it may hold records that someone needs.

    Raises:
        UsageError: it exists.
    """
    from laminar.client.errors import AlreadyExists

    try:
        client.create_topic(topic, partitions=partitions, replicas=replicas, settings=settings)
    except AlreadyExists:
        raise UsageError(
            f"topic {topic} exists, and records would be appended to it: name a new one, or permit it with "
            f"--existing"
        ) from None


def check_size(client: Client, size: int, *, at_least: int) -> None:
    """Refuse a record size that is over the cluster's limit. Raises `UsageError`."""
    most = client.request_json("GET", "/v1/limits")["max_record_bytes"]
    if not at_least <= size <= most:
        raise UsageError(f"--size is {at_least} to {most:,} bytes, not {size:,}")


def described(client: Client, topic: str) -> dict[str, Any]:
    """Return the set-up of a run: nodes, topic, this program."""
    from importlib.metadata import version

    from laminar.compiled import described as compiled

    about, nodes = client.topic(topic).describe(), client.cluster()["nodes"]
    return {
        "nodes": [
            {"node": each["node"], "shards": len(each.get("shards") or ()), "alive": each.get("alive")}
            for each in nodes
        ],
        "server_version": client.request_json("GET", "/v1/version")["version"],
        "topic": topic,
        "partitions": about.partitions,
        "replicas": about.replicas,
        "flush": about.settings.get("flush", "commit"),
        "settings": dict(about.settings),
        "client": {
            "version": version("laminar-mq"),
            "modules": compiled(),
            "python": platform.python_version(),
            "cpus": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.release()}",
        },
    }
