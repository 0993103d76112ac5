"""A prefix of a bucket as the place of a backup.

A bucket cannot be locked. So that two exports at a time do no harm, a file is only created, never replaced
(``If-None-Match: *``), and the manifest replaces only the one that was read (``If-Match``): the second export
is refused. Files of other forms than `batch`, whose contents cannot be compared with the topic, have the
export in their names, and so has their manifest. Unlisted ones are removed after the manifest was replaced,
when the export that wrote them can no longer list them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import secrets
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import BinaryIO, Final, cast

from laminar.batch import Buffer
from laminar.client.backup.files import digest_of
from laminar.client.backup.manifest import ENDINGS, MANIFEST, MOST_MANIFEST_BYTES, name_parts, records_name
from laminar.client.backup.object_store import READ_BYTES, Exists, Missing, ObjectStore
from laminar.client.backup.place import Place
from laminar.client.errors import ConfigError, Error

MOST_PUT_BYTES = 5 << 30
"""S3's limit of one PUT; what is larger, which only the value of a record can be, is uploaded in parts."""
PROBE_KEPT: Final = timedelta(days=1)

_PROBE: Final = ".writing-"
_NO_ETAG: Final = f'"{"0" * 32}"'


class Bucket(Place):
    """A prefix of a bucket for one topic's backup: ``s3://BUCKET/PREFIX``."""

    def __init__(self, text: str, *, field: str) -> None:
        """Use the place that `text` names. Raises `ConfigError`, with `field`."""
        self.store = ObjectStore(text, field=field)
        self._field = field
        self.export = secrets.token_hex(4)
        self._has_begun = False
        self._known: bytes | None = None
        self._etag: str | None = None
        self._sizes: dict[str, int] = {}
        self._by_ending: dict[tuple[int, str], list[tuple[int, str]]] = {}
        self._dropped: list[str] = []

    def __str__(self) -> str:
        return str(self.store)

    def begin(self) -> None:
        """Read the manifest, then list the objects. Raises `Error` if others than a backup's are there."""
        # The manifest first: the list has all files that it names, also if another export ends meanwhile.
        self._known, self._has_begun = self._get_manifest(), True
        for name, listed in self.store.listed().items():
            parts = name_parts(name)
            if parts is not None:
                self._by_ending.setdefault((parts[0], parts[2]), []).append((parts[1], name))
            elif name.startswith(_PROBE):
                if datetime.now(UTC) - listed.modified > PROBE_KEPT:  # of an export that was killed
                    self.store.delete(name)
                continue
            elif (not name or name.endswith("/")) and not listed.bytes:
                continue  # a "folder", as the pages of stores make them
            elif name != MANIFEST:
                raise ConfigError(
                    f"{self} has {name!r}, which is no part of a backup",
                    code="not_a_backup",
                    field=self._field,
                    value=str(self),
                    hint="name a new or empty prefix, or that of an earlier backup",
                )
            self._sizes[name] = listed.bytes
        for names in self._by_ending.values():
            names.sort()
        self._probe()

    def end(self) -> None:
        """Do nothing: nothing is locked."""

    def stop(self) -> None:
        """Let a request that is under way in another thread not be repeated."""
        self.store.stop()

    def _probe(self) -> None:
        """Refuse a store that replaces an object although the request says that it must not."""
        name = f"{_PROBE}{self.export}"
        try:
            with contextlib.suppress(Exists):  # ours, if the answer was lost
                self.store.put(name, b"1", only_new=True)
            for condition in ("If-None-Match", "If-Match"):
                with contextlib.suppress(Exists):
                    if condition == "If-Match":
                        self.store.put(name, b"2", only_etag=_NO_ETAG)
                    else:
                        self.store.put(name, b"2", only_new=True)
                    raise Error(
                        f"{self}: the store ignores {condition}, so two exports could destroy a backup",
                        code="unsupported",
                        field=self._field,
                        value=str(self),
                        limit="a store with conditional writes",
                    )
        finally:
            self.store.delete(name)

    # -- reading ---------------------------------------------------------------------------

    def open(self, name: str) -> BinaryIO:
        """Open an object. Raises `FileNotFoundError`, or `Error`."""
        try:
            return cast(BinaryIO, io.BufferedReader(self.store.open(name), READ_BYTES))
        except Missing:
            raise FileNotFoundError(self.path_of(name)) from None

    def size_of(self, name: str) -> int | None:
        """Return the bytes of a file, listed by `begin` or written since; None if there is none."""
        return self._sizes.get(name)

    def names(self, partition: int, ending: str) -> list[tuple[int, str]]:
        """Return the offsets and names of a partition's files with an ending, as `begin` found them."""
        return self._by_ending.get((partition, ending), [])

    def read_manifest(self) -> bytes | None:
        """Return the bytes of the manifest, since `begin` those that it found; None if there is none."""
        return self._known if self._has_begun else self._get_manifest()

    def _get_manifest(self) -> bytes | None:
        try:
            reader = self.store.open(MANIFEST)
        except Missing:
            self._etag = None
            return None
        with io.BufferedReader(reader, READ_BYTES) as file:
            self._etag = reader.etag
            return file.read(MOST_MANIFEST_BYTES)

    # -- writing ---------------------------------------------------------------------------

    def new_name(self, partition: int, offset: int, ending: str) -> str:
        """Return the name for a new file; only batches can be taken over from an export that was killed."""
        export = "" if ending == ENDINGS["batch"] else self.export
        return records_name(partition, offset, ending, export=export)

    def writer(self, name: str) -> ObjectWriter:
        """Begin a file; return its writer, which gathers it in the folder for temporary files."""
        return ObjectWriter(self, name)

    def create(self, name: str, file: BinaryIO, size: int, digest: bytes) -> None:
        """Create an object from a file, and verify it: `digest` is its SHA-256.

        Raises:
            Error: (`in_use`) there is an object of that name with other bytes: another export created it.
        """
        try:
            if size > MOST_PUT_BYTES:
                file.seek(0)
                self.store.upload(name, file, size)
                self._compare(name, digest)  # the store verified no digest of the whole
            else:
                self.store.put(name, file, sha256=base64.b64encode(digest).decode(), only_new=True)
        except Exists:
            self._compare(name, digest)
        self._sizes[name] = size

    def _compare(self, name: str, digest: bytes) -> None:
        """Compare an object that is there with the bytes that were to be written. Raises `Error`."""
        try:
            found = digest_of(self, name)[1]
        except FileNotFoundError:
            raise self.store.unreadable(self.path_of(name), "it is missing after it was written") from None
        if found != digest.hex():
            raise self._in_use(name)

    @property
    def has_dropped(self) -> bool:
        """Whether dropped files stay until the manifest is replaced."""
        return bool(self._dropped)

    def drop(self, name: str) -> None:
        """Remove a file when the manifest is replaced: who wrote it may still be running until then."""
        self._dropped.append(name)

    def put_manifest(self, data: bytes) -> None:
        """Replace the manifest that was read, then remove dropped files.

        Raises:
            Error: (`in_use`) another export has replaced it meanwhile.
        """
        try:
            self.store.put(MANIFEST, data, only_new=self._etag is None, only_etag=self._etag)
        except Exists:
            if self._get_manifest() != data:  # else it is ours, and the answer was lost
                raise self._in_use(MANIFEST) from None
        dropped, self._dropped = self._dropped, []
        for name in dropped:
            self.store.delete(name)
            self._sizes.pop(name, None)

    def _in_use(self, name: str) -> Error:
        return ConfigError(
            f"{self.path_of(name)}: another export writes to it",
            code="in_use",
            field=self._field,
            value=str(self),
            hint="run the export again when the other has ended: it goes on",
        )


class ObjectWriter:
    """A file of a bucket that is being written, as `place.Writer` says: `finish` sends it."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket = bucket
        self._name = name
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by finish or discard
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Buffer) -> None:
        """Add bytes. Raises `OSError`, with the folder's name."""
        with self._named():
            self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def finish(self) -> str:
        """Create the object, and return its SHA-256 as hexadecimal digits. Raises `OSError` or `Error`."""
        with self._named():
            self._file.flush()
        self._bucket.create(self._name, cast(BinaryIO, self._file), self.bytes, self._hash.digest())
        self._file.close()
        return self._hash.hexdigest()

    def discard(self) -> None:
        """Remove the incomplete file. Idempotent; does nothing after `finish`."""
        with contextlib.suppress(OSError):  # the disk is full: what could not be written goes anyway
            self._file.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # the file has no name: its folder is what is full
            error.filename = tempfile.gettempdir()
            raise
