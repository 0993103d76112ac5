"""Objects below a prefix of a bucket: Amazon S3, or another store with its API, by boto3.

Endpoint, region and credentials are those of the AWS tools: ``AWS_ENDPOINT_URL_S3``, ``AWS_REGION``,
``AWS_PROFILE``, ``AWS_ACCESS_KEY_ID``, the role of a machine.

boto3 repeats what a store refuses for a while. Repeated here is what boto3 takes for an answer: one that ends
within its head, so that a list would be empty and an object without bytes; and the body of an object, which
goes on where its connection broke.
"""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO, Final, NamedTuple, cast

from laminar.client.errors import ConfigError, Error, Unavailable

SCHEME: Final = "s3://"
ATTEMPTS = 6
RETRY_S = 0.2
LONGEST_PAUSE_S = 10.0
CONNECT_TIMEOUT_S = 10
ANSWER_TIMEOUT_S = 60
READ_BYTES = 4 << 20
PART_BYTES = 16 << 20
MOST_PARTS: Final = 10_000
"""S3's limit of an upload in parts."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,254}\Z", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()=+@,:&$/-]{1,900}\Z", re.ASCII)
_ALLOWED = "s3://BUCKET/PREFIX, with a prefix of 1 to 900 letters, digits and !_.*'()=+@,:&$/-, no . or .."
_SECRET = re.compile(r"//\S*@|\?\S*")


class Exists(Exception):
    """The condition of a request did not hold: the object is there, or is another one."""


class Missing(Exception):
    """There is no such object."""


class Listed(NamedTuple):
    """An object in a list."""

    bytes: int
    modified: datetime


class ObjectStore:
    """The objects below a prefix, by their names after it. All methods block.

    Every method raises `Error` with `field` and a text that names the object: `Unavailable` if the store does
    not answer or asks for patience, `ConfigError` if endpoint or credentials are wrong.
    """

    def __init__(self, text: str, *, field: str) -> None:
        """Use the bucket and the prefix that ``s3://BUCKET/PREFIX`` names.

        Raises:
            ConfigError: `text` has another form, or the library boto3 is not installed.
        """
        bucket, _, prefix = text.removeprefix(SCHEME).partition("/")
        prefix = prefix.strip("/")
        segments = prefix.split("/")
        if not _BUCKET.match(bucket) or not _PREFIX.match(prefix) or {"", ".", ".."} & set(segments):
            raise ConfigError(
                f"{masked(text)} is not s3://BUCKET/PREFIX",
                code="bad_place",
                field=field,
                value=masked(text),
                limit=_ALLOWED,
            )
        self._field = field
        self._bucket = bucket
        self._prefix = f"{prefix}/"
        self._is_stopped = False
        self._client = self._connected(text)

    def _connected(self, text: str) -> Any:
        try:
            import boto3.session
            import botocore.config
        except ImportError:
            raise ConfigError(
                f"{text} needs the library boto3",
                code="missing_extra",
                field=self._field,
                value=text,
                hint="pip install 'laminar-mq[s3]'",
            ) from None
        try:
            client: Any = boto3.session.Session().client(
                "s3",
                config=botocore.config.Config(
                    retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
                    connect_timeout=CONNECT_TIMEOUT_S,
                    read_timeout=ANSWER_TIMEOUT_S,
                ),
            )
        except _errors() as error:
            raise self.refused(error, str(self)) from None
        client.meta.events.register("before-send.s3", self._go_on)
        return client

    def __str__(self) -> str:
        return f"{SCHEME}{self._bucket}/{self._prefix[:-1]}"

    def path_of(self, name: str) -> str:
        """Return the URL of an object."""
        return f"{self}/{name}"

    def stop(self) -> None:
        """Let a request that is under way in another thread not be repeated, by boto3 either."""
        self._is_stopped = True

    def _go_on(self, **_: object) -> None:
        if self._is_stopped:
            raise InterruptedError("interrupted")

    # -- requests --------------------------------------------------------------------------

    def listed(self) -> dict[str, Listed]:
        """Return all objects, by name."""
        found: dict[str, Listed] = {}
        more: dict[str, str] = {}
        while True:
            answer = self._call(
                "list_objects_v2",
                None,
                lambda answer: "KeyCount" in answer and "IsTruncated" in answer,
                Prefix=self._prefix,
                **more,
            )
            for each in answer.get("Contents", ()):
                name = each["Key"].removeprefix(self._prefix)
                found[name] = Listed(each["Size"], each["LastModified"])
            if not answer["IsTruncated"]:
                return found
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def open(self, name: str) -> ObjectReader:
        """Open an object, to be read from its start. Raises `Missing`, or `Error`."""
        return ObjectReader(self, name)

    def get(self, name: str, *, after: int = 0, etag: str | None = None) -> dict[str, Any]:
        """Return the answer to a request for an object's bytes after the first `after`.

        With an `etag` it is the object that had it.

        Raises:
            Missing: there is no object.
            Error: (`damaged`) the object was replaced.
        """
        more = {} if etag is None else {"IfMatch": etag, "Range": f"bytes={after}-"}
        try:
            return self._call("get_object", name, _is_whole_get, **more)
        except Exists:
            raise Error(
                f"{self.path_of(name)} was replaced while it was read",
                code="damaged",
                field=self._field,
                value=str(self),
            ) from None

    def put(
        self,
        name: str,
        body: BinaryIO | bytes,
        *,
        sha256: str | None = None,
        only_new: bool = False,
        only_etag: str | None = None,
    ) -> None:
        """Write an object; `sha256`, in base64, is verified by the store.

        Raises:
            Exists: with `only_new` the object exists; with `only_etag` it has another ETag, or is missing.
                An object may be of this request, which was repeated because its answer was lost.
        """
        more: dict[str, Any] = {}
        if sha256 is not None:
            more["ChecksumSHA256"] = sha256
        if only_new:
            more["IfNoneMatch"] = "*"
        if only_etag is not None:
            more["IfMatch"] = only_etag
        try:
            self._call("put_object", name, _has_etag, Body=body, **more)
        except Missing:  # as stores say it of `only_etag`
            raise Exists from None

    def upload(self, name: str, file: BinaryIO, size: int) -> None:
        """Create an object of any size from a file, in parts.

        Raises:
            Exists: there is an object. It may be of this upload, whose last answer was lost.
        """
        begun = self._call("create_multipart_upload", name, lambda answer: "UploadId" in answer)
        upload = {"UploadId": begun["UploadId"]}
        part_bytes = max(PART_BYTES, -(-size // MOST_PARTS))
        parts: list[dict[str, Any]] = []
        try:
            while data := file.read(part_bytes):
                number = len(parts) + 1
                answer = self._call("upload_part", name, _has_etag, Body=data, PartNumber=number, **upload)
                parts.append({"ETag": answer["ETag"], "PartNumber": number})
            self._call(
                "complete_multipart_upload",
                name,
                _has_etag,
                MultipartUpload={"Parts": parts},
                IfNoneMatch="*",
                **upload,
            )
        except BaseException:
            with contextlib.suppress(Error, Exists, Missing):
                self._call("abort_multipart_upload", name, **upload)
            raise

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
        self._call("delete_object", name)

    def _call(
        self,
        operation: str,
        name: str | None,
        is_whole: Callable[[dict[str, Any]], bool] = lambda answer: True,
        **more: Any,
    ) -> dict[str, Any]:
        """Make a request for one object, or for the bucket if `name` is None; return the answer."""
        key = {} if name is None else {"Key": f"{self._prefix}{name}"}
        where = str(self) if name is None else self.path_of(name)
        trouble: Error | None = None
        for attempt in range(ATTEMPTS):
            if attempt:
                pause(attempt)
            self.check_stopped(where)
            if hasattr(more.get("Body"), "seek"):
                more["Body"].seek(0)
            try:
                answer = getattr(self._client, operation)(Bucket=self._bucket, **key, **more) or {}
            except _errors() as error:
                code, status = _code_and_status(error)
                if status == 412 or code == "PreconditionFailed":
                    raise Exists from None
                if code == "NoSuchKey" and name is not None:
                    raise Missing from None
                if code == "NoSuchUpload":  # it is complete, or another export has ended it
                    raise Exists from None
                trouble = self.refused(error, where)
                # The store asks for it; or the answer ended within its head.
                was_cut = isinstance(error, ValueError) or (status and not _is_of_s3(code))
                if code == "ConditionalRequestConflict" or was_cut:
                    continue
                raise trouble from None
            if is_whole(answer):
                return cast(dict[str, Any], answer)
            trouble = self.unreadable(where, "the answer is none of S3's, or not whole")
            if "Body" in answer:
                answer["Body"].close()
        assert trouble is not None, "every attempt returned or left an error"
        raise trouble

    def check_stopped(self, where: str) -> None:
        """Raise `Error` after `stop`; `where` names the object."""
        if self._is_stopped:
            raise self.unreadable(where, "interrupted")

    # -- errors ----------------------------------------------------------------------------

    def unreadable(self, where: str, why: str) -> Error:
        """Return the error for an answer that did not arrive as S3 sends it."""
        return Unavailable(f"{where}: {why}", code="object_store", field=self._field, value=str(self))

    def refused(self, error: Exception, where: str) -> Error:
        """Return the error for one of the library, of the store, or of this machine."""
        import botocore.exceptions

        code, status = _code_and_status(error)
        if isinstance(error, RecursionError):
            said = "the endpoint redirects each request"
        elif status and not _is_of_s3(code):
            said = f"HTTP {status}, and not in the form of S3: is the endpoint that of the API?"
        else:
            said = masked(str(error)) or type(error).__name__
        text = f"{where}: {said}"
        more: dict[str, Any] = {"code": "object_store", "field": self._field, "value": str(self)}
        if status == 501 or code == "NotImplemented":
            return Error(text, status=status, hint="the store must have conditional writes", **more)
        if status in (429, 503) or status >= 500 or code in ("SlowDown", "ConditionalRequestConflict"):
            return Unavailable(text, status=status, **more)
        if status:
            return Error(text, status=status, **more)
        network = (
            *(botocore.exceptions.HTTPClientError, botocore.exceptions.ConnectionError),
            botocore.exceptions.IncompleteReadError,
        )
        if isinstance(error, network) and not isinstance(error, botocore.exceptions.SSLError):
            return Unavailable(text, **more)
        hint = "endpoint, region and credentials are those of the AWS tools, for example AWS_PROFILE"
        return ConfigError(text, hint=hint, **more)


class ObjectReader(io.RawIOBase):
    """The bytes of an object; a connection that breaks is made again where it broke."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._body: Any = None
        self._store = store
        self._name = name
        self._at = 0
        self._is_first = True
        self._open()

    def _open(self) -> None:
        answer = self._store.get(self._name)
        self._body = answer["Body"]
        self.etag: str = answer["ETag"]
        """The version of the object."""
        self._size: int = answer["ContentLength"]

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes into `buffer`; return how many, 0 at the end. Raises `Error`."""
        attempt = 0
        why = ""
        while self._at < self._size:
            self._store.check_stopped(self._store.path_of(self._name))
            if attempt == ATTEMPTS:
                raise self._store.unreadable(self._store.path_of(self._name), why)
            if attempt:
                pause(attempt)
                self._reopen()
            attempt += 1
            try:
                data = self._body.read(min(len(buffer), self._size - self._at))
            except _errors() as error:
                why = str(error)
                continue
            why = f"the store sends {self._at} of {self._size} bytes"
            if data:
                buffer[: len(data)] = data
                self._at += len(data)
                self._verify_end()
                return len(data)
        return 0

    def _verify_end(self) -> None:
        """Let boto3 compare the checksum that the store sent, which it does after the last byte."""
        if self._at == self._size and self._is_first:
            try:
                self._body.read(1)
            except _errors() as error:
                path = self._store.path_of(self._name)
                raise self._store.unreadable(path, f"the bytes that came are others: {error}") from None

    def _reopen(self) -> None:
        self._body.close()
        if self._at == 0:
            self._open()
            return
        self._is_first = False
        answer = self._store.get(self._name, after=self._at, etag=self.etag)
        self._body = answer["Body"]
        if answer["ContentLength"] != self._size - self._at:
            path = self._store.path_of(self._name)
            raise self._store.unreadable(path, "the store ignores Range: the read cannot go on")

    def close(self) -> None:
        """Close the connection."""
        if not self.closed and self._body is not None:
            self._body.close()
        super().close()


def masked(text: str) -> str:
    """Return `text` without what stands before an @ or after a ? in a URL: it may be a secret."""
    return _SECRET.sub(lambda found: "//…@" if found[0].endswith("@") else "?…", text)


def pause(attempt: int) -> None:
    """Sleep before an attempt, from 1: longer each time."""
    time.sleep(min(LONGEST_PAUSE_S, RETRY_S * 2 ** (attempt - 1)))


def _is_whole_get(answer: dict[str, Any]) -> bool:
    return "ContentLength" in answer and _has_etag(answer)


def _has_etag(answer: dict[str, Any]) -> bool:
    etag = answer.get("ETag", "")
    return len(etag) > 2 and etag[-1] == '"'


def _code_and_status(error: Exception) -> tuple[str, int]:
    """Return code and HTTP status of a store's refusal; an empty code and 0 for another error."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return str(response.get("Error", {}).get("Code", "")), status


def _is_of_s3(code: str) -> bool:
    """Return whether a refusal had a code. Without one boto3 gives none, or the HTTP status."""
    return bool(code) and not code.isdigit()


def _errors() -> tuple[type[Exception], ...]:
    """Return what boto3 raises. A `ValueError` is a wrong endpoint, or an answer cut in its head."""
    import boto3.exceptions
    import botocore.exceptions
    import botocore.parsers

    return (
        *(OSError, ValueError, RecursionError),
        *(botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError),
        *(boto3.exceptions.Boto3Error, botocore.parsers.ResponseParserError),
    )
