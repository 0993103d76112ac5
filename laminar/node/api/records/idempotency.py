"""Identities of appends: read from a request's head, written into its batches, recognised on a retry.

With `Idempotency-Key` a client names a request; its batch gets the hash of the key, and a hash of the
request's content, which distinguishes another request with the same key from a retry. `Laminar-Producer`,
`Laminar-Epoch` and `Laminar-Sequence` number batches as our client does. A partition recognises retries in
`laminar.node.partition.deduplication`; `append` decides whether a request is forwarded or repeated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256

from laminar.batch import Header
from laminar.batch.header import NO_PRODUCER, set_producer
from laminar.http.api.append_body import Append
from laminar.http.api.parameters import MAX_EPOCH
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.http.api.timestamps import parse_time
from laminar.http.protocol.messages import Request

KEY = "idempotency-key"
PRODUCER = "laminar-producer"
EPOCH = "laminar-epoch"
SEQUENCE = "laminar-sequence"
KEY_TIME = "laminar-key-time"

LONGEST_KEY = 255
MAX_SEQUENCE = 2**63 - 1

_KEY = re.compile(r"[!-~]{1,255}\Z", re.ASCII)
_PRODUCER = re.compile(r"[0-9a-fA-F]{32}\Z", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,19}\Z", re.ASCII)


@dataclass(slots=True, frozen=True)
class BatchIdentity:
    """The producer id, epoch and sequence number of a request's batch.

    With an idempotency `key` the id is a hash of the key, the epoch 0, and the sequence number a hash of the
    request.
    """

    producer_id: bytes
    epoch: int
    sequence: int
    key: str | None = None
    # The time at which the client created the key, in ms since the Unix epoch, if the request names it.
    made_ms: int | None = None


def has_identity(request: Request) -> bool:
    """Return whether the head names a key or a producer, so that a repeated append takes effect once."""
    return KEY in request.headers or PRODUCER in request.headers


def key_of(request: Request) -> str | None:
    """Return the request's idempotency key, or None.

    Raises:
        Problem: 422 `invalid`.
    """
    key = request.headers.get(KEY)
    if key is not None and not _KEY.match(key):
        raise Problem(
            "invalid",
            "an idempotency key must be visible ASCII without spaces",
            field=KEY,
            value=key,
            limit=f"1 to {LONGEST_KEY} characters",
        )
    return key


def identity_of(request: Request, *, scope: str) -> BatchIdentity | None:
    """Return the identity of an append's batch, from the request's head; None without key and producer.

    `scope` is the kind of target (topic or partition): the same body sent to another kind is another request.

    Raises:
        Problem: 422 `invalid`.
    """
    headers = request.headers
    key = key_of(request)
    if key is not None:
        if PRODUCER in headers:
            raise Problem(
                "invalid",
                "an idempotency key and a producer's sequence exclude each other",
                field=KEY,
                value=key,
            )
        made = headers.get(KEY_TIME)
        made_ms = None if made is None else parse_time(made, field=KEY_TIME)
        return BatchIdentity(_key_id(key, 0), 0, _content(request, scope), key, made_ms)
    if KEY_TIME in headers:
        raise Problem(
            "invalid", "the time of a key requires the key", field=KEY_TIME, value=headers[KEY_TIME]
        )
    producer = headers.get(PRODUCER)
    if producer is None:
        for name in (EPOCH, SEQUENCE):
            if name in headers:
                raise Problem(
                    "invalid", "a sequence requires the producer id", field=name, value=headers[name]
                )
        return None
    if not _PRODUCER.match(producer) or bytes.fromhex(producer) == NO_PRODUCER:
        raise Problem(
            "invalid",
            "a producer id must be 32 hexadecimal digits, not all of them 0",
            field=PRODUCER,
            value=producer,
            limit=32,
        )
    return BatchIdentity(
        bytes.fromhex(producer),
        _number(headers.get(EPOCH, "0"), EPOCH, MAX_EPOCH),
        _number(headers.get(SEQUENCE, ""), SEQUENCE, MAX_SEQUENCE),
    )


def named(problem: Problem, given: BatchIdentity | None) -> Problem:
    """Return the problem; if it is about a key, its value is replaced by the key as the client sent it.

    Partitions know only the hash of a key.
    """
    if given is not None and problem.field == KEY:
        problem.value = given.key
    return problem


def identified(append: Append, given: BatchIdentity) -> list[memoryview]:
    """Return the batches of a request with its identity written into them.

    A request with a key may have several batches: each gets an id from the key and its position among them.

    Raises:
        Problem: 422 `invalid`.
    """
    if append.records is not None:
        return [memoryview(build_identified(append.records, given))]
    if given.key is None and len(append.frames) > 1:
        raise Problem(
            "invalid",
            "a sequence can be given for one batch only",
            field=SEQUENCE,
            value=len(append.frames),
            limit=1,
        )
    frames = []
    for place, frame in enumerate(append.frames):
        if Header.unpack(frame).producer_id != NO_PRODUCER:
            raise Problem(
                "invalid",
                "a batch that carries a producer id must be sent without this header",
                field=KEY if given.key is not None else PRODUCER,
                value=given.key if given.key is not None else given.producer_id.hex(),
            )
        own = bytearray(frame)
        _write(own, given, place)
        frames.append(memoryview(own))
    return frames


def build_identified(records: Records, given: BatchIdentity) -> bytearray:
    """Return one batch of these records, with the identity in it.

    Raises:
        Problem: 422 `invalid`.
    """
    try:
        frame = records.build()
    except ValueError as error:
        raise Problem("invalid", str(error), outcome="not_applied") from error
    _write(frame, given, 0)
    return frame


def _write(frame: bytearray, given: BatchIdentity, place: int) -> None:
    if given.key is None:
        set_producer(
            frame, producer_id=given.producer_id, epoch=given.epoch, sequence=given.sequence, keyed=False
        )
    else:
        set_producer(
            frame, producer_id=_key_id(given.key, place), epoch=0, sequence=given.sequence, keyed=True
        )


def _key_id(key: str, place: int) -> bytes:
    text = f"key\0{key}\0{place}" if place else f"key\0{key}"
    return sha256(text.encode("ascii", "replace")).digest()[:16]


def _content(request: Request, scope: str) -> int:
    """Return 63 bits of a hash of all parts of a request that determine the appended records."""
    headers = request.headers
    fields = [scope, headers.get("content-type", "")]
    for name, value in sorted(request.query.items()):
        if name != "ack":
            fields += ["?", name, value]
    for name in sorted(headers):
        if name == "laminar-tag" or name.startswith("laminar-header-"):
            fields += [":", name, headers[name]]
    digest = sha256()
    for field in fields:
        encoded = field.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "big"))
        digest.update(encoded)
    digest.update(b"\0body")
    digest.update(request.body)
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def _number(text: str, name: str, limit: int) -> int:
    if not _NUMBER.match(text) or int(text) > limit:
        raise Problem("invalid", f"{name} must be a decimal number", field=name, value=text, limit=limit)
    return int(text)
