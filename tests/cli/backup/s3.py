"""Backups in a bucket of the tests' object store."""

from __future__ import annotations

from typing import Any

from laminar.client.backup.bucket import Bucket
from laminar.client.backup.contents import check
from laminar.client.backup.export import export_topic
from laminar.client.backup.files import digest_of, manifest_of
from laminar.client.backup.manifest import Form
from tests.cli.backup.backups import FILE_BYTES, in_session

BUCKET = "backups"


def place_of(prefix: str) -> Bucket:
    return Bucket(f"s3://{BUCKET}/{prefix}", field="to")


def to_bucket(url: str, topic: str, place: Bucket, *, form: Form = "batch") -> Any:
    return in_session(
        url, lambda session: export_topic(session, topic, place, form=form, file_bytes=FILE_BYTES)
    )


def is_whole(prefix: str) -> bool:
    """Whether each file that the manifest names is there, with its bytes."""
    place = place_of(prefix)
    manifest = manifest_of(place)
    assert manifest is not None
    if manifest.form == "batch":
        check(place, manifest)
    else:
        for each in manifest.partitions:
            for file in each.files:
                assert (file.bytes, file.sha256) == digest_of(place, file.name)
    return True
