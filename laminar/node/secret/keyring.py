"""The cluster's secrets as a process knows them: it uses the first and accepts all of them.

There are two while an operator changes the secret node by node (docs/operating.md#a-new-secret), so that no
node is refused that still uses the other one. The secrets are lines of a file. It is read again as
certificates are: on SIGHUP, and when it has changed. What cannot be used is reported and changes nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from laminar.node.secret.keys import Keys

log = logging.getLogger("laminar.secret")

MOST_SECRETS: Final = 2
SHORTEST: Final = 16
"""Characters of a secret."""
_LONGEST_FILE_BYTES: Final = 4096


class SecretFileError(Exception):
    """A text or file has no secrets that can be used; the message says why, and shows no secret."""


def secrets_of(text: str) -> list[str]:
    """Return the secrets in a text, one a line, without empty lines.

    Raises:
        SecretFileError: there is none, too many, or one that is too short.
    """
    found = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if not found:
        raise SecretFileError("is empty")
    if len(found) > MOST_SECRETS:
        raise SecretFileError(f"has {len(found)} secrets, at most {MOST_SECRETS} hold at a time")
    for number, secret in enumerate(found, 1):
        if len(secret) < SHORTEST:
            which = f"secret {number} " if len(found) > 1 else ""
            raise SecretFileError(f"{which}must have at least {SHORTEST} characters")
    return found


def read_secrets(path: str) -> list[str]:
    """Return the secrets in a file. Blocks.

    Raises:
        SecretFileError: it can't be read, or has none that can be used.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(_LONGEST_FILE_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SecretFileError(f"can't be read: {error}") from error
    if len(content) > _LONGEST_FILE_BYTES:
        raise SecretFileError(f"has more than {_LONGEST_FILE_BYTES} bytes")
    return secrets_of(text)


class Keyring:
    """The keys of the secrets that one process uses and accepts; empty if the cluster has no secret."""

    def __init__(self, secrets: Sequence[str] = (), *, path: str = "") -> None:
        """Use these secrets; `path` is the file that they were read from, which `refresh` reads again."""
        self.current: tuple[Keys, ...] = tuple(Keys(secret.encode()) for secret in secrets)
        """The first is used, all are accepted. It is replaced when they change: keep no copy."""
        self._secrets = list(secrets)
        self._path = path
        self._seen: object = None
        self._failed_from: object = None
        self.loaded = 0
        self.failed = 0

    @classmethod
    def of_file(cls, path: str) -> Keyring:
        """Return the keyring of a file. Blocks.

        Raises:
            SecretFileError: the file can't be used.
        """
        seen = _signature(path)
        keyring = cls(read_secrets(path), path=path)
        keyring._seen = seen
        keyring.loaded = 1
        return keyring

    def __repr__(self) -> str:
        return f"<Keyring {len(self.current)} secrets>"

    def __bool__(self) -> bool:
        return bool(self.current)

    @property
    def first(self) -> Keys | None:
        """The keys that are used; None without a secret."""
        return self.current[0] if self.current else None

    @property
    def changes(self) -> bool:
        """Whether the secrets come from a file, so that they may change."""
        return bool(self._path)

    def refresh(self, *, again: bool = False) -> bool:
        """Read the file if it has changed or `again` is set. Blocks; may run in a thread.

        Return whether other secrets are in use. A file that cannot be used is logged once, and tried again at
        each call.
        """
        if not self._path:
            return False
        seen = _signature(self._path)
        if seen == self._seen and not again:
            return False
        try:
            found = read_secrets(self._path)
        except SecretFileError as error:
            self.failed += 1
            if seen != self._failed_from or again:
                log.error(
                    "the file of secrets cannot be used, and the secrets in use are kept: %s %s",
                    self._path,
                    error,
                )
            self._failed_from = seen
            return False
        self._seen, self._failed_from = seen, None
        if found == self._secrets:
            return False
        if not set(found) & set(self._secrets):
            log.warning(
                "%s has none of the secrets of before: nodes that do not know the new one are refused",
                self._path,
            )
        used = "the same as before" if found[0] == self._secrets[0] else "another than before"
        self.loaded += 1
        self._secrets = found
        self.current = tuple(Keys(secret.encode()) for secret in found)
        log.info("secrets loaded from %s: %d are accepted; used is %s", self._path, len(found), used)
        return True

    def statistics(self) -> dict[str, int]:
        """Return how many secrets are accepted, and counters of the file's loads."""
        return {"accepted": len(self.current), "loaded": self.loaded, "load_failures": self.failed}


def _signature(path: str) -> object:
    """Return a value that changes when the file is replaced or written."""
    try:
        found = os.stat(path)
    except OSError as error:
        return str(error)
    return found.st_ino, found.st_size, found.st_mtime_ns
