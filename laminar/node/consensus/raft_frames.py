"""Encoding and decoding of the frames of Raft messages that two processes send each other.

There is one frame for each loop turn and channel. A *control* frame is a plain list of small messages. A
*keepalive* frame is one process's sign of life to another, for all groups that are quiesced between them. A
*bulk* frame carries `Append` messages with their batches: the messages and the sizes of the batches first,
then the batches unchanged, so that they need not be copied or encoded again. This module does not decide when
frames are sent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from laminar.batch import Buffer, Header, Kind, body_of
from laminar.node.consensus.raft_wire import PLAIN_KEEPALIVE, Keepalive, configuration_record
from raft.messages import AnyMessage, Append, Natural, decode, encode
from raft.values import Entry

_PREFIX: Final = struct.Struct("<BI")
_CONTROL: Final = 1
_BULK: Final = 2
_KEEPALIVE: Final = 3

_sizes_encoder: Final = msgspec.msgpack.Encoder()
_sizes_decoder: Final = msgspec.msgpack.Decoder(tuple[bytes, list[list[Natural]]])
_keepalive_encoder: Final = msgspec.msgpack.Encoder()
_keepalive_decoder: Final = msgspec.msgpack.Decoder(Keepalive)
_PLAIN_BODY: Final = _keepalive_encoder.encode(PLAIN_KEEPALIVE)
_PLAIN_FRAME: Final = _PREFIX.pack(_KEEPALIVE, len(_PLAIN_BODY)) + _PLAIN_BODY


class StampedBatch(NamedTuple):
    """A batch in its place in the log, with its header: the `data` of an entry."""

    frame: Buffer
    header: Header


def entry_of(frame: Buffer, header: Header) -> Entry:
    """Return a stamped batch as an entry for the Raft core; `header` is the decoded header of `frame`."""
    configuration = None
    if header.kind == Kind.CONFIGURATION:
        configuration = configuration_record(body_of(frame)).configuration()
    return Entry(header.index, header.term, StampedBatch(frame, header), len(frame), configuration)


def control_frame(messages: Sequence[AnyMessage]) -> list[Buffer]:
    """Encode small messages as one control frame; return its parts, which are to be sent in order."""
    body = encode(messages)
    return [_PREFIX.pack(_CONTROL, len(body)), body]


def keepalive_frame(keepalive: Keepalive) -> list[Buffer]:
    """Encode a keepalive as a frame; return the frame's parts, which are to be sent in order."""
    if keepalive is PLAIN_KEEPALIVE:
        return [_PLAIN_FRAME]
    body = _keepalive_encoder.encode(keepalive)
    return [_PREFIX.pack(_KEEPALIVE, len(body)), body]


def read_keepalive(frame: memoryview) -> Keepalive | None:
    """Return the keepalive in a frame; None if it is another kind of frame.

    Raises:
        ValueError: if it is a keepalive frame that can't be decoded.
    """
    if len(frame) < _PREFIX.size or frame[0] != _KEEPALIVE:
        return None
    if frame == _PLAIN_FRAME:
        return PLAIN_KEEPALIVE
    try:
        return _keepalive_decoder.decode(frame[_PREFIX.size :])
    except msgspec.MsgspecError as error:
        raise ValueError(f"a keepalive: {error}") from error


def bulk_frame(appends: Sequence[tuple[Append, Sequence[Buffer]]]) -> list[Buffer]:
    """Return the parts of a bulk frame with these appends and their batches, which are not copied."""
    sizes = [[len(frame) for frame in frames] for _, frames in appends]
    head = _sizes_encoder.encode((encode([append for append, _ in appends]), sizes))
    parts: list[Buffer] = [_PREFIX.pack(_BULK, len(head)), head]
    for _, frames in appends:
        parts.extend(frames)
    return parts


def read_frame(frame: memoryview) -> list[tuple[AnyMessage, list[memoryview]]]:
    """Return the messages of a frame, each with its batches (none on the control channel).

    Raises:
        ValueError: if the frame is malformed.
    """
    if len(frame) < _PREFIX.size:
        raise ValueError(f"a frame of {len(frame)} bytes")
    kind, length = _PREFIX.unpack_from(frame)
    position = _PREFIX.size + length
    head = frame[_PREFIX.size : position]
    if kind == _CONTROL:
        return [(message, []) for message in decode(head)]
    if kind != _BULK:
        raise ValueError(f"a frame of unknown kind {kind}")
    try:
        encoded, all_sizes = _sizes_decoder.decode(head)
    except msgspec.DecodeError as error:
        raise ValueError(f"the sizes of a bulk frame: {error}") from error
    messages = decode(encoded)
    if len(messages) != len(all_sizes):
        raise ValueError(f"{len(messages)} messages but {len(all_sizes)} lists of sizes")
    result: list[tuple[AnyMessage, list[memoryview]]] = []
    for message, sizes in zip(messages, all_sizes, strict=True):
        frames = []
        for size in sizes:
            frames.append(frame[position : position + size])
            position += size
        result.append((message, frames))
    if position != len(frame):
        raise ValueError(f"a bulk frame of {len(frame)} bytes says it has {position}")
    return result
