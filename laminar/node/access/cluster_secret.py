"""The secret that a cluster's nodes share if none is set: the first node generates it.

With tokens each node needs a secret, even if it listens on the loopback only: otherwise any process of the
machine could act as a node, and make requests that no token permits.
"""

from __future__ import annotations

import logging
import os
import secrets
from typing import Final

import msgspec

from laminar.node.access.private_files import read_private, write_private
from laminar.node.host.settings import TOKENS, Settings
from laminar.node.secret.keyring import Keyring, SecretFileError, secrets_of

_log = logging.getLogger("laminar.supervisor")

FILE: Final = "secret"
SECRET_BYTES: Final = 32


class SecretError(Exception):
    """The node needs the cluster's secret and can't have one; the text says what to do."""


def with_secret(settings: Settings, directory: str, *, joins: bool) -> Settings:
    """Return the settings with a secret: their own, that of the data folder, or a new one, stored there.

    `joins` says that the cluster has other nodes, or the node is about to join one; then no secret is
    generated, because the other nodes would not know it.

    Raises:
        SecretError: a secret is needed, and there is none; or the file can't be read or written.
    """
    if settings.secret:
        return settings
    path = os.path.join(directory, FILE)
    try:
        known = read_private(path)
        if not known and settings.access != TOKENS:
            return settings
        if not known and joins:
            raise SecretError(
                "access is tokens, so the nodes of a cluster need a secret, and none is set here: set "
                f"secret_file (--secret-file, LAMINAR_SECRET_FILE) to the file {FILE} in the first node's "
                "data folder, or LAMINAR_SECRET to the same on every node; with access=open on every node "
                "none is needed on the loopback"
            )
        if not known:
            known = secrets.token_urlsafe(SECRET_BYTES)
            write_private(path, known)
            _log.info("made the secret of this cluster: %s; nodes that join need the same secret", path)
        first = secrets_of(known)[0]
    except OSError as error:
        raise SecretError(f"the cluster's secret: {error}") from error
    except SecretFileError as error:
        raise SecretError(f"the cluster's secret: {path} {error}") from error
    return msgspec.structs.replace(settings, secret=first)


def keyring_of(settings: Settings, directory: str) -> Keyring:
    """Return the secrets of settings that `with_secret` returned; if they come from a file, all in the file.

    Raises:
        SecretError: the file can't be read any more.
    """
    if not settings.secret:
        return Keyring()
    path = settings.secret_file
    try:
        if not path:
            drawn = os.path.join(directory, FILE)
            known = read_private(drawn)
            if not known or secrets_of(known)[0] != settings.secret:
                return Keyring([settings.secret])
            path = drawn
        return Keyring.of_file(path)
    except OSError as error:
        raise SecretError(f"the cluster's secret: {error}") from error
    except SecretFileError as error:
        if settings.secret_file:
            raise SecretError(f"secret_file {path} {error}") from error
        return Keyring([settings.secret])
