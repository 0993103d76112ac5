"""Read a client's token from a file, and check its form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from laminar.client.errors import ConfigError

FileIdentity: TypeAlias = tuple[int, int, int]
"""What changes when a file is written or replaced."""


def identity_of(file: str) -> FileIdentity:
    """Return a value that changes when the file is replaced or written. Raises OSError if it is missing."""
    found = os.stat(file)
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_token(file: str) -> tuple[str, FileIdentity]:
    """Return the token in `file`, and the identity of the file.

    Raises:
        ConfigError: the file cannot be read, or contains no token.
    """
    try:
        identity = identity_of(file)  # before the content: a change in between is seen at the next look
        text = Path(file).read_text("ascii").strip()
    except OSError as fault:
        raise _unusable(file, fault.strerror or str(fault)) from None
    except UnicodeDecodeError:
        raise _unusable(file, "a token is text in ASCII") from None
    if not text:
        raise _unusable(file, "the file is empty")
    check_token(text, "token_file")
    return text, identity


def check_token(token: str, origin: str) -> None:
    """Raise `ConfigError` if `token` cannot be a token. The error names `origin`, and not the text."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{origin} has no token: a token is text in ASCII, without spaces and line breaks",
            code="bad_token",
            field=origin,
            hint="`laminar token create` makes one",
        )


def _unusable(file: str, why: str) -> ConfigError:
    return ConfigError(f"{file}: {why}", code="bad_token_file", field="token_file", value=file)
