"""`laminar secret`: the secret of a cluster's nodes, and the steps by which it is changed while they serve.

Each step changes one file, on one machine, and asks no server: a node follows its file by itself. What comes
before and after a step is in docs/operating.md#a-new-secret. No secret is shown but a new one.
"""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from laminar.cli.errors import Failed, UsageError
from laminar.node.secret.keyring import SecretFileError, read_secrets

SECRET_BYTES = 32

File = Annotated[Path, Parameter(help="The file of the node's secrets: `secret_file`, or DATA/secret.")]


def draw() -> None:
    """Print a new secret: 256 random bits."""
    sys.stdout.write(f"{secrets.token_urlsafe(SECRET_BYTES)}\n")


def add(
    file: File, new: Annotated[Path, Parameter(help="The file of the new secret, the same for every node.")]
) -> None:
    """Accept a new secret too, and still use the old one: the first step of a change."""
    known, found = _read(file), _read(new)
    if len(found) != 1:
        raise UsageError(f"NEW has one secret ({new} has {len(found)})")
    if known == [known[0], found[0]]:
        return  # the step was taken before
    if found[0] == known[0]:
        raise UsageError(f"NEW has the secret that {file} uses already")
    if len(known) > 1:
        raise UsageError(f"{file} has a second secret already: `laminar secret drop` ends an earlier change")
    _write(file, [known[0], found[0]])


def use(file: File) -> None:
    """Use the new secret, and still accept the old one: the second step of a change."""
    known = _read(file)
    if len(known) != 2:
        raise UsageError(f"{file} has only one secret: `laminar secret add` is the step before")
    _write(file, known[::-1])


def drop(file: File) -> None:
    """Accept only the new secret: the last step of a change."""
    _write(file, _read(file)[:1])


def _read(path: Path) -> list[str]:
    try:
        return read_secrets(str(path))
    except SecretFileError as error:
        raise Failed(f"{path} {error}") from None


def _write(path: Path, found: list[str]) -> None:
    """Replace the file durably, and keep its owner; on an error the old file stays as it was."""
    path = path.resolve()
    new = path.with_name(f"{path.name}.new")
    try:
        before = path.stat()
        new.unlink(missing_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(fd, before.st_uid, before.st_gid)
            os.fchmod(fd, before.st_mode & 0o777)
            file.write("".join(f"{secret}\n" for secret in found))
            file.flush()
            os.fsync(fd)
        new.rename(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise Failed(f"{path} can't be written: {error}") from None
