"""The systems that Laminar is measured beside, as far as they are there."""

from __future__ import annotations

import sys

from benches.queues import queue_kafka, queue_nats, queue_redis
from benches.queues.queues import PEERS, Peer


def peers(target: str) -> dict[str, Peer]:
    """Return the peers that are there; say which are not. `target` is what `make` calls this benchmark."""
    sys.path.append(str(PEERS))
    found: dict[str, Peer] = {"nats": queue_nats, "kafka": queue_kafka, "redis": queue_redis}
    for name, peer in list(found.items()):
        if (why := peer.missing()) is not None:
            print(f"{peer.TITLE} is left out: {why}; `make {target}` installs what it can", flush=True)
            del found[name]
    return found
