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
from typing import NamedTuple

import msgspec

from laminar.batch import Buffer, Header, Kind, body_of
from raft.configuration import Configuration
from raft.messages import AnyMessage, Append, Natural, decode, encode
from raft.values import Entry

_PREFIX = struct.Struct("<BI")
_CONTROL = 1
_BULK = 2
_KEEPALIVE = 3

_sizes_encoder = msgspec.msgpack.Encoder()
_sizes_decoder = msgspec.msgpack.Decoder(tuple[bytes, list[list[Natural]]])


class Keepalive(msgspec.Struct, frozen=True, array_like=True):
    """A sign of life of a process, with questions about quiesced groups, and answers to such questions.

    It does not name the sender's incarnation, which is known from the nonce in the connection's handshake.
    """

    asks: list[tuple[bytes, Natural]] = []
    """(group, term): the sender asks whether the receiver leads this quiesced group in this term."""
    wakes: list[bytes] = []
    """Groups that the sender does not lead, or not quiesced: the receiver must not stay quiesced there."""


_keepalive_encoder = msgspec.msgpack.Encoder()
_keepalive_decoder = msgspec.msgpack.Decoder(Keepalive)


class ConfigurationRecord(msgspec.Struct, frozen=True, array_like=True):
    """Body of a `configuration` batch: (replica id, node) of voters and of learners.

    `abandoned` are the ids of former members that an operator's decision abandoned. `successor_of` is used
    only in entry 1: the id of the change of routes that created the partition, or 0.
    """

    voters: tuple[tuple[int, str], ...]
    learners: tuple[tuple[int, str], ...] = ()
    abandoned: tuple[int, ...] = ()
    successor_of: int = 0

    def configuration(self) -> Configuration:
        """Return the configuration as the Raft core uses it: replica ids without nodes."""
        return Configuration(
            voters=tuple(replica for replica, _ in self.voters),
            learners=tuple(replica for replica, _ in self.learners),
            abandoned=self.abandoned,
        )

    def nodes(self) -> dict[int, str]:
        """Return the node of each replica id."""
        return dict(self.voters) | dict(self.learners)

    def with_learner(self, replica_id: int, node: str) -> ConfigurationRecord:
        """Return the configuration with one more learner."""
        return ConfigurationRecord(self.voters, (*self.learners, (replica_id, node)), self.abandoned)

    def promoted(self, replica_id: int) -> ConfigurationRecord:
        """Return the configuration in which the learner `replica_id` is a voter."""
        (learner,) = (each for each in self.learners if each[0] == replica_id)
        others = tuple(each for each in self.learners if each is not learner)
        return ConfigurationRecord((*self.voters, learner), others, self.abandoned)

    def without(self, replica_id: int) -> ConfigurationRecord:
        """Return the configuration without the voter or learner `replica_id`."""
        return ConfigurationRecord(
            tuple(each for each in self.voters if each[0] != replica_id),
            tuple(each for each in self.learners if each[0] != replica_id),
            self.abandoned,
        )

    def encoded(self) -> bytes:
        """Return the record encoded as the payload of a `configuration` batch.

        `successor_of` is left out if it is 0, so that entry 1 has the same bytes on every replica, also on
        one whose program does not know the field.
        """
        if self.successor_of:
            return msgspec.msgpack.encode(self)
        return msgspec.msgpack.encode((self.voters, self.learners, self.abandoned))


def configuration_record(payload: Buffer) -> ConfigurationRecord:
    """Decode the payload of a `configuration` batch."""
    return msgspec.msgpack.decode(payload, type=ConfigurationRecord)


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


# Most keepalives ask nothing and answer nothing, and there are many.
PLAIN_KEEPALIVE = Keepalive()
_PLAIN_BODY = _keepalive_encoder.encode(PLAIN_KEEPALIVE)
_PLAIN_FRAME = _PREFIX.pack(_KEEPALIVE, len(_PLAIN_BODY)) + _PLAIN_BODY


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
