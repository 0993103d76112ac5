"""Requests that split, merge and move partitions, and so change a topic's route (docs/splitting.md).

The route says which partition takes which keys. The cluster carries out a change by itself: these functions
only begin one and wait for its end. A request that is sent again finds the change that the first one began.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from laminar.client.descriptions import RouteInfo
from laminar.client.errors import Error, NotFound, PreconditionFailed, TimedOut
from laminar.client.net.session import Session, topic_path
from laminar.wire.key_route import logical_of_key

# How often the progress of a change is asked for.
POLL_MS = 1_000
PAUSE_S = 0.1
# How long a change is waited for beyond the time that it may wait for its inputs.
PATIENCE_S = 60.0
# How often a change is begun again, because another one of the topic came first.
TRIES = 5
# How long a node may take to hear of a change that another one has named.
VIEW_WAIT_S = 5.0


def logical_cuts(at: str | bytes | Sequence[int] | None) -> list[int]:
    """Return the logical partitions (hashes of keys) at which to cut: that of a key, or those given."""
    if isinstance(at, str | bytes):
        return [logical_of_key(at)]
    return [] if at is None else list(at)


async def routes_of(session: Session, topic: str) -> Mapping[str, Any]:
    """Return the answer of ``GET /v1/topics/{topic}/routes``."""
    answer: Mapping[str, Any] = await session.get_json(f"{topic_path(topic)}/routes")
    return answer


async def route_from(session: Session, topic: str, version: int, *, begun: bool = False) -> RouteInfo:
    """Return the topic's route, once a node knows this version of it or a newer one.

    `begun` and the errors are as those of `routes_from`.
    """
    return RouteInfo.from_answer(await routes_from(session, topic, version, begun=begun))


async def routes_from(
    session: Session, topic: str, version: int, *, begun: bool = False
) -> Mapping[str, Any]:
    """Return the answer of `routes_of`, once a node knows this version of the route or a newer one.

    With `begun`, a node that knows that the change to this version is under way is enough. The change may
    have been cancelled meanwhile; so after `VIEW_WAIT_S` whatever a node knows is returned.

    Raises:
        TimedOut: no node that answers knows the version after `PATIENCE_S`.
    """
    began = time.monotonic()
    while True:
        answer = await routes_of(session, topic)
        route = RouteInfo.from_answer(answer)
        passed_s = time.monotonic() - began
        if route.version >= version or (begun and (route.changing == version or passed_s >= VIEW_WAIT_S)):
            return answer
        if passed_s >= PATIENCE_S:
            raise TimedOut(
                f"no node that answers knows route {version} of topic {topic}",
                code="timed_out",
                field="version",
                value=version,
                limit=route.version,
            )
        await asyncio.sleep(PAUSE_S)


async def change_route(
    session: Session,
    topic: str,
    inputs: Sequence[int],
    *,
    cuts: Sequence[int] = (),
    into: int | None = None,
    avoid: Sequence[str] = (),
    wait: float,
    abandon: bool,
    force: bool,
) -> int:
    """Begin a change that replaces the partitions `inputs`; return the version of the route after it.

    Raises:
        PreconditionFailed: other changes of the topic came first, `TRIES` times.
        Error: the cluster refuses the change.
    """
    body: dict[str, Any] = {
        "inputs": list(inputs),
        "cuts": list(cuts),
        "wait_ms": math.ceil(wait * 1000),
        "abandon": abandon,
        "force": force,
        "avoid": list(avoid),
    }
    if into is not None:
        body["into"] = into
    for tries_left in reversed(range(TRIES)):
        body["after"] = int((await routes_of(session, topic))["routes"][0]["version"])
        try:
            answer = await session.call(
                "POST",
                f"{topic_path(topic)}/routes",
                body=msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
            )
        except PreconditionFailed:
            if not tries_left:
                raise
            await asyncio.sleep(PAUSE_S)
        else:
            return int(answer.json()["version"])
    raise AssertionError("the last try returns or raises")


async def until_done(
    session: Session,
    topic: str,
    version: int,
    *,
    wait: float,
    progress: Callable[[Mapping[str, Any]], None] | None = None,
) -> RouteInfo:
    """Wait until the change to route `version` is done; return the topic's present route.

    Until then, `progress` is called each second with the description of the change.

    Raises:
        Error: (``route_cancelled``) the change was cancelled; the message says what it waited for.
        TimedOut: the change was not done after `wait` + `PATIENCE_S` seconds. The cluster goes on with it.
    """
    path = f"{topic_path(topic)}/routes/{version}"
    deadline = time.monotonic() + wait + PATIENCE_S
    while True:
        try:
            change = await session.get_json(f"{path}?wait_ms={POLL_MS}", timeout_s=wait + PATIENCE_S)
        except NotFound as error:
            if error.code != "no_such_route":
                raise
            raise Error(
                f"the change to route {version} of topic {topic} was cancelled: {error.message}",
                code="route_cancelled",
                field="version",
                value=version,
                limit=error.limit,
                outcome="not_applied",
            ) from error
        if change["state"] == "done":
            return await route_from(session, topic, version)
        if progress is not None:
            progress(change)
        if time.monotonic() >= deadline:
            waits_for = "; ".join(change.get("waits_for") or ()) or "nothing that is known"
            raise TimedOut(
                f"the change to route {version} of topic {topic} is {change['state']}, and goes on; it waits "
                f"for: {waits_for}",
                code="timed_out",
                field="version",
                value=version,
                outcome="unknown",
            )


async def cancel_route(session: Session, topic: str) -> int | None:
    """Cancel the change that is under way; return the version of its route, None if there is none.

    Raises:
        Error: (``in_progress``) it is too late: the partitions that it replaces are ending.
    """
    # A node of an older version names no change: none begins before all nodes know changes.
    version = RouteInfo.from_answer(await routes_of(session, topic)).changing
    if version is not None:
        await session.call("DELETE", f"{topic_path(topic)}/routes/{version}", accept=(404,))
    return version
