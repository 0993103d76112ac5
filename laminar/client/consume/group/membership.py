"""A member of a consumer group: its name, its session at the group's leader, and who else is live.

A member that could not renew its session in time may be counted as dead. It then continues under a new name.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Set
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from laminar.client.consume.group.partition_leases import LEASE_ATTEMPT_S, NOT_NOW
from laminar.client.errors import Error
from laminar.client.net.session import Session, topic_path
from laminar.client.policy.assignment import Members

Mode = Literal["clustering", "broadcast"]

RENEW_S = 1.0
RETRY_S = 0.1


class Membership:
    """This program's session in a consumer group, which it renews every second.

    `wake` is set when other partitions may be this member's, `changed` after each renewal. `on_new_route` is
    called when the group's leader names a newer route of the topic.
    """

    def __init__(
        self,
        session: Session,
        topic: str,
        *,
        group: str,
        mode: Mode,
        member: str | None,
        session_s: float,
        wake: asyncio.Event,
        changed: asyncio.Event,
        on_new_route: Callable[[], None],
    ) -> None:
        self.group = group
        self.mode: Mode = mode
        self.member = member
        self.session_s = session_s
        self._session = session
        self._topic = topic
        self._wake = wake
        self._changed = changed
        self._on_new_route = on_new_route
        self.id = ""
        # Earlier names of this member. A name is removed from the group once no lease is held under it.
        self._former: set[str] = set()
        # The version of the topic's route, as the group's leader said last.
        self.route = 0
        self.members = Members(live=frozenset())
        # Until when no other member may count this one as dead, in seconds of the monotonic clock.
        self.valid_until_s = 0.0

    def rename(self) -> None:
        """Take a new name, under which the next renewal begins a session."""
        self.id = f"{self.member}.{secrets.token_hex(8)}" if self.member else secrets.token_hex(8)

    def _path(self, member: str = "") -> str:
        group, member = quote(self.group, safe=""), quote(member or self.id, safe="")
        return f"{topic_path(self._topic)}/groups/{group}/members/{member}"

    async def keep_renewing(self) -> None:
        """Renew the session every second, until an error that is permanent."""
        while True:
            await asyncio.sleep(RENEW_S)
            # Without an answer for half a session, ask again at once: when the whole session has passed,
            # others may count this member as dead. It must then take a new name, and under a new name other
            # partitions are assigned to it.
            while True:
                try:
                    await self.renew(timeout_s=self.session_s / 2)
                    break
                except NOT_NOW:
                    await asyncio.sleep(RETRY_S)

    async def renew(self, *, timeout_s: float) -> None:
        """Renew the session, under a new name if the old one may count as dead; note the live members."""
        if 0 < self.valid_until_s <= time.monotonic() and self.mode == "clustering":
            # Others may count this member as dead, and be about to claim what it owns. Their claims name the
            # old name as expected owner, so they fail for what this member has claimed again under a new one.
            self._former.add(self.id)
            self.rename()
            self.valid_until_s = 0.0
        asked_s = time.monotonic()
        try:
            document = await self._ask_to_renew(timeout_s)
        except Error as error:
            if error.code != "stale_route" or self.route:
                raise
            self.route = 1  # the answer has the version
            document = await self._ask_to_renew(timeout_s)
        live = frozenset(str(each["member"]) for each in document["members"])
        members = Members(live=live, forming=bool(document["forming"]))
        # Counted from before the request was sent, so the session ends here before it ends at the leader.
        self.valid_until_s = asked_s + self.session_s
        route = int(document.get("route", 0))
        if members != self.members or route > self.route:
            self.members = members
            self._wake.set()
        if route > self.route:
            self.route = route
            self._on_new_route()
            places = self._session.topic_map_nowait(self._topic)
            if places is not None and places.route.version < route:
                places.stale = True
        self._changed.set()

    async def _ask_to_renew(self, timeout_s: float) -> dict[str, Any]:
        body: dict[str, object] = {"mode": self.mode, "session_ms": int(self.session_s * 1000)}
        if self.route:
            body["routes"] = True  # a node of an older program, which has no such topic, would refuse it
        answer = await self._session.call(
            "PUT",
            self._path(),
            body=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
            timeout_s=timeout_s,
            attempt_timeout_s=max(LEASE_ATTEMPT_S, self.session_s / 4),
        )
        document: dict[str, Any] = answer.json()
        return document

    async def leave_as_former(self, held: Set[str]) -> None:
        """Remove this member's former names from the group, so that no partition is assigned to them.

        Names in `held` stay: leases are held under them.
        """
        for name in self._former - held:
            self._former.discard(name)
            with contextlib.suppress(Error):  # then the name is removed when its session expires
                await self._session.call("DELETE", self._path(name), timeout_s=LEASE_ATTEMPT_S)

    async def leave(self, *, timeout_s: float) -> None:
        """Remove this member from the group. If the request fails, its session expires some time later."""
        with contextlib.suppress(Error):
            await self._session.call("DELETE", self._path(), timeout_s=timeout_s)
