"""The files of a backup, read and verified, in whatever place they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from laminar.batch import HEADER_SIZE, BatchError, Header
from laminar.batch.header import verify_body, verify_header
from laminar.client.backup.manifest import MANIFEST, BatchFile, Manifest, ValueFile, decode, wrong
from laminar.client.backup.place import Place
from laminar.client.errors import ConfigError, Error

READ_BYTES = 4 << 20


def manifest_of(place: Place) -> Manifest | None:
    """Return the manifest of the backup so far, checked; None before the first is written. Raises `Error`."""
    data = place.read_manifest()
    return None if data is None else decode(data, where=place.path_of(MANIFEST))


def manifest_bytes(place: Place) -> bytes:
    """Return the bytes of the manifest of a backup. Raises `Error` if there is none."""
    data = place.read_manifest()
    if data is None:
        raise ConfigError(
            f"{place} has no {MANIFEST}: it is no backup, or its export did not end",
            code="not_a_backup",
            field="from",
            value=str(place),
            hint="run the export again, it goes on",
        )
    return data


def digest_of(place: Place, name: str) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a file. Raises `Error` if it cannot be read."""
    digest = hashlib.sha256()
    size = 0
    with place.open(name) as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
            size += len(data)
    return size, digest.hexdigest()


def missing(place: Place, file: BatchFile | ValueFile) -> Error:
    """Return the error for a file that the manifest names and the place lacks."""
    return wrong(place.path_of(file.name), "file", "missing", f"{file.bytes} bytes")


def compare(place: Place, file: BatchFile | ValueFile, size: int, digest: str) -> None:
    """Compare what was read of a file with the manifest. Raises `Error` (`damaged`)."""
    if size != file.bytes:
        raise wrong(place.path_of(file.name), "bytes", size, file.bytes)
    if digest != file.sha256:
        raise wrong(place.path_of(file.name), "sha256", digest, file.sha256)


def frames_of(place: Place, name: str, *, at: int) -> Iterator[tuple[bytearray, Header]]:
    """Yield the batches of a file, verified, with their headers; the first begins at offset `at`.

    Raises:
        Error: (`damaged`) a batch is incomplete or damaged, or does not follow the one before.
    """
    where = place.path_of(name)
    with place.open(name) as file:
        while head := file.read(HEADER_SIZE):
            try:
                header = verify_header(head)
                frame = bytearray(head) + file.read(header.body_length)
                verify_body(frame, header)
            except BatchError as error:
                raise wrong(where, f"batch at {at}", str(error), "a whole batch") from None
            if header.base_offset != at or not header.count:
                raise wrong(where, "base_offset", header.base_offset, at)
            yield frame, header
            at = header.next_offset
