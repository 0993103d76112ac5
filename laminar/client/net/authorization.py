"""The token of a client: its source, and the nodes to which it is sent.

A token file is read again when it changes, so a program gets a new token without a restart: make the second
token, write it into the file, then revoke the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from laminar.client.errors import ConfigError, Error
from laminar.client.net.endpoints import Endpoints
from laminar.client.net.token_file import FileIdentity, identity_of, read_token

LOOK_MS = 1_000
"""How often the file of a token is looked at, while no answer says that its token is not accepted."""
SETTLE_MS = 1_000
"""How long a refused token is sent again after it was new here: some nodes may not know it yet."""


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Authorization:
    """The token that a client sends with its requests, read again when its file changes.

    `version` rises when the token changes.

    Raises:
        ConfigError: the token file cannot be read or contains no token, and `endpoints` has no other token.
    """

    def __init__(self, endpoints: Endpoints, *, now_ms: Callable[[], int] = _now_ms) -> None:
        self._endpoints = endpoints
        self._token = endpoints.token
        self._now_ms = now_ms
        self._new_at_ms = now_ms()
        self._look_at_ms = self._new_at_ms + LOOK_MS
        self._identity: FileIdentity | None = None
        self._may_hear: dict[str, bool] = {}  # by URL
        self.version = 0
        if endpoints.token_file is not None:
            try:
                self._token, self._identity = read_token(endpoints.token_file)
            except ConfigError:
                if self._token is None:
                    raise

    def header(self, url: str) -> str | None:
        """Return the value of the header ``Authorization`` for a request to `url`; None if it has none."""
        if self._token is None or not self.may_ask(url):
            return None
        return f"Bearer {self._token}"

    def may_ask(self, url: str) -> bool:
        """Return whether requests may be sent to `url`: true without a token, or if it may get the token."""
        if self._token is None:
            return True
        found = self._may_hear.get(url)
        if found is None:
            found = self._may_hear[url] = self._endpoints.may_hear_token(url)
        return found

    def look(self) -> int:
        """Check the token file for changes, at most once in `LOOK_MS`; return `version`."""
        if self._endpoints.token_file is not None and self._now_ms() >= self._look_at_ms:
            self._read_again()
        return self.version

    def may_pass(self, url: str, version: int) -> bool:
        """Return whether a request that `url` refused, with the token of `version`, should be sent again.

        It should if the file has a new token now. An unchanged token is sent again only while it is so new
        that `url` may not know it yet.
        """
        if self._token is None and self._endpoints.certificate is not None:
            return self._now_ms() < self._new_at_ms + SETTLE_MS  # as with a token: a node may not know it yet
        if self._token is None or not self.may_ask(url):
            return False
        if self._endpoints.token_file is not None and self.version == version:
            self._read_again()
        return self.version != version or self._now_ms() < self._new_at_ms + SETTLE_MS

    def _read_again(self) -> None:
        assert self._endpoints.token_file is not None
        self._look_at_ms = self._now_ms() + LOOK_MS
        try:
            if identity_of(self._endpoints.token_file) == self._identity:
                return
            token, identity = read_token(self._endpoints.token_file)
        except (OSError, ConfigError):
            return  # it is being replaced: the last one holds
        self._identity = identity
        if token != self._token:
            self._token = token
            self._new_at_ms = self._now_ms()
            self.version += 1

    def explain(self, url: str, error: Error) -> Error:
        """Return `error`, the answer of `url`; if it is a 401 because no token was sent, say so in it."""
        if error.status == 401 and not self.may_ask(url):
            error.message = f"the token is not sent to {url}, as no URL that was given has this host"
            error.args = (error.message,)
            error.hint = (
                "give the URLs of all nodes, or use https with the cluster's CA: ca=, LAMINAR_CA, --ca"
            )
        return error
