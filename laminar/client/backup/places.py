"""The place that a text names: a folder, or a prefix of a bucket."""

from __future__ import annotations

from pathlib import Path

from laminar.client.backup.bucket import Bucket
from laminar.client.backup.folder import Folder
from laminar.client.backup.object_store import SCHEME, masked
from laminar.client.backup.place import Place
from laminar.client.errors import ConfigError


def place_at(text: str, *, field: str) -> Place:
    """Return the place that `text` names: the path of a folder, or ``s3://BUCKET/PREFIX``.

    Raises:
        ConfigError: `text` is another URL, or a wrong one, or a library is missing. It names `field`.
    """
    if text.startswith(SCHEME):
        return Bucket(text, field=field)
    if "://" in text or text.lower().startswith("s3:"):
        raise ConfigError(
            f"{masked(text)} is neither a folder nor s3://BUCKET/PREFIX",
            code="bad_place",
            field=field,
            value=masked(text),
            limit="FOLDER or s3://BUCKET/PREFIX",
        )
    return Folder(Path(text))
