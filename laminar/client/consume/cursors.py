"""Requests that read and move a cursor: a named position by partition, which the cluster keeps.

Each commit of `CursorState` names the positions that it expects to replace. If another client has moved the
cursor meanwhile, the server refuses the commit. Which member owns a cursor's partition is decided in
`laminar.client.consume.group.subscription`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from laminar.client.descriptions import CursorInfo
from laminar.client.errors import Error
from laminar.client.net.session import Session, topic_path


def cursor_path(topic: str, name: str) -> str:
    """Return the path of a cursor's resource."""
    return f"{topic_path(topic)}/cursors/{quote(name, safe='')}"


async def cursors_of(session: Session, topic: str) -> list[CursorInfo]:
    """Return the descriptions of all cursors of the topic, sorted by name."""
    found: list[CursorInfo] = []
    after: str | None = ""
    while after is not None:
        page = f"?limit=1000&after={quote(after, safe='')}" if after else "?limit=1000"
        answer = await session.get_json(f"{topic_path(topic)}/cursors{page}")
        found += [CursorInfo.from_answer(each) for each in answer["cursors"]]
        after = answer.get("next")
    return found


async def rewind_cursor(session: Session, topic: str, name: str, to: str | Mapping[int, int]) -> CursorInfo:
    """Move a cursor, also in partitions that members of its group own; return its new description.

    `to` is ``"earliest"``, ``"latest"`` or a time in ms since the epoch as text, for all partitions; or
    offsets by partition, and the cursor stays as it is in all others.
    """
    place = to if isinstance(to, str) else {str(number): offset for number, offset in to.items()}
    answer = await session.call(
        "PUT",
        cursor_path(topic, name),
        body=msgspec.json.encode({"rewind": place}),
        headers={"Content-Type": "application/json"},
    )
    return CursorInfo.from_answer(answer.json())


class CursorState:
    """The positions and owners of one cursor, as the cluster reported them last.

    A position is the next offset to read, by partition. A commit names the positions that it replaces, so the
    cluster refuses it if another client has moved the cursor since.
    """

    def __init__(self, session: Session, topic: str, name: str) -> None:
        self._session = session
        self._target = cursor_path(topic, name)
        self.name = name
        self.committed: dict[int, int] = {}
        self.owners: dict[int, str] = {}

    async def load(self) -> dict[int, int]:
        """Read the cursor from the cluster; return its committed positions by partition, {} if it is new."""
        answer = await self._session.call("GET", self._target, accept=(404,))
        found = {} if answer.status == 404 else answer.json()
        self.committed = {int(key): _position(value) for key, value in found.get("positions", {}).items()}
        self.owners = {int(key): str(owner) for key, owner in found.get("owners", {}).items()}
        return dict(self.committed)

    async def commit(self, positions: Mapping[int, int], *, force: bool = False) -> None:
        """Commit `positions`: by partition, the next offset to read. Unchanged ones are left out.

        With `force` the partitions are also taken from the members that owned them at the last `load`.

        Raises:
            PreconditionFailed: another client moved the cursor since the last `load` or commit.
            Fenced: a member of a group owns one of the partitions; with `force`: another one than at the last
                `load`.
        """
        changed = {key: value for key, value in positions.items() if self.committed.get(key) != value}
        if force:
            for owner in sorted({self.owners.get(key, "") for key in positions}):
                theirs = {key: positions[key] for key in positions if self.owners.get(key, "") == owner}
                await self._put(theirs if owner else {k: v for k, v in theirs.items() if k in changed}, owner)
            self.owners = {key: owner for key, owner in self.owners.items() if key not in positions}
        else:
            await self._put(changed)

    async def _put(self, changed: Mapping[int, int], expected_owner: str | None = None) -> None:
        if not changed:
            return
        # A partition that is not in `expected` is expected to have no position yet.
        body = {
            "positions": {str(key): value for key, value in changed.items()},
            "expected": {str(key): self.committed[key] for key in changed if key in self.committed},
            "expected_owner": expected_owner,
        }
        try:
            await self._session.call(
                "PUT",
                self._target,
                body=msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
            )
        except Error as error:
            # The answer of an earlier attempt may have been lost. Then the cursor is at our positions
            # already, which is a success.
            if error.status != 412:
                raise
            wanted = {**self.committed, **changed}
            if await self.load() != wanted:
                raise
        self.committed |= dict(changed)

    async def delete(self) -> None:
        """Delete the cursor."""
        await self._session.call("DELETE", self._target, accept=(404,))
        self.committed = {}


def _position(value: Any) -> int:
    # A server may send a position as an object with further members instead of a number.
    return int(value["position"] if isinstance(value, dict) else value)
