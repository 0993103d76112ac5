"""The first token of a cluster, for its operator: the catalog's leader creates it if there is no credential.

The token is written to the file `admin-token` in the leader's data folder *before* the catalog is asked, so
that no credential is ever created whose token is lost. The catalog accepts it only while there is no
credential, so of two nodes that lead one after the other at most one creates it. A file whose token is not in
the catalog is removed: another node created the first token, or the token was revoked.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from typing import Final

from laminar.node.access.private_files import read_private, remove_private, write_private
from laminar.node.access.tokens import id_of, new_token
from membership.catalog import ACCESS_SINCE, Catalog
from membership.records import CredentialRecord, Grant
from membership.requests import CreateCredential

_log = logging.getLogger("laminar.controller")

FILE: Final = "admin-token"
PRINCIPAL: Final = "admin"


class FirstToken:
    """Creates the first token, in a node's controller, and manages its file."""

    def __init__(self, directory: str, *, now_ms: Callable[[], int]) -> None:
        """Store the token in the data folder `directory`; `now_ms` returns the wall clock's time."""
        self._path = os.path.join(directory, FILE)
        self._now_ms = now_ms
        # The file is checked once after a start, and once after each attempt.
        self._tidy = False

    async def make_if_none(self, catalog: Catalog) -> None:
        """Create the first token if there is no credential. Only the catalog's leader may call it.

        Raises:
            NotCatalogLeader: no token was created; the file may exist until a later call.
            OutcomeUnknown: it is unknown whether the token was created; the file exists.
        """
        if catalog.code_version < ACCESS_SINCE or catalog.state().credentials:
            return
        self._tidy = False
        made = new_token(os.urandom)
        try:
            await asyncio.get_running_loop().run_in_executor(None, write_private, self._path, made.text)
        except OSError as error:
            _log.error("the first token can't be written: %s", error)
            return
        step = CreateCredential(
            id=made.id,
            name=PRINCIPAL,
            grants=[Grant("admin", "")],
            salt=made.salt,
            digest=made.digest,
            created_ms=self._now_ms(),
            only_if_none=True,
        )
        result = await catalog.change_access(step)
        if result.outcome == "created":
            _log.info("made the first token, of an admin: %s", self._path)

    async def tidy(self, catalog: Catalog) -> None:
        """Remove the file if the catalog does not have its token.

        The catalog must be at least as new as this process's start: then it has the token of an earlier
        start, or will never get it.
        """
        credentials = catalog.state().credentials
        if self._tidy or not credentials:
            return
        self._tidy = True
        await asyncio.get_running_loop().run_in_executor(None, self._remove_unless_in, credentials)

    def _remove_unless_in(self, credentials: Mapping[str, CredentialRecord]) -> None:
        try:
            text = read_private(self._path)
            if text and id_of(text) not in credentials:
                remove_private(self._path)
                _log.info("removed %s: the cluster does not know its token", self._path)
        except OSError as error:
            _log.error("%s may have an unknown token: %s", self._path, error)
