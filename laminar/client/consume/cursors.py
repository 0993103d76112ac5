"""A cursor's positions, as a client keeps and moves them.

`CursorState` compares what it sets with what was committed last, so that two clients that move one cursor
notice each other. Which member owns a cursor's partition is decided in `laminar.client.consume.subscription`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from laminar.client.errors import Error
from laminar.client.net.session import Session, topic_path


def cursor_path(topic: str, name: str) -> str:
    """Return the path of a cursor's resource."""
    return f"{topic_path(topic)}/cursors/{quote(name, safe='')}"


class CursorState:
    """A cursor's positions: what was committed last, to compare with at the next commit."""

    def __init__(self, session: Session, topic: str, name: str) -> None:
        self._session = session
        self._target = cursor_path(topic, name)
        self.name = name
        self.committed: dict[int, int] = {}
        self.owners: dict[int, str] = {}

    async def load(self) -> dict[int, int]:
        """Return the committed positions by partition; {} for a new cursor."""
        answer = await self._session.call("GET", self._target, accept=(404,))
        found = {} if answer.status == 404 else answer.json()
        self.committed = {int(key): _position(value) for key, value in found.get("positions", {}).items()}
        self.owners = {int(key): str(owner) for key, owner in found.get("owners", {}).items()}
        return dict(self.committed)

    async def commit(self, positions: Mapping[int, int], *, force: bool = False) -> None:
        """Set `positions`. With `force` the cursor is taken from those who owned it when it was loaded.

        Raises:
            PreconditionFailed: another client moved the cursor since.
            Fenced: others own it.
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
            # A repeated PUT whose first answer was lost finds its own positions: that is a success.
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
    # A server may describe a position (offset, lag) where a bare number would do.
    return int(value["position"] if isinstance(value, dict) else value)
