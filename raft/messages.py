"""The messages of the protocol, and their form on the wire.

Every message names its cluster, its group, both replica ids, the sender's incarnation and the sender's term,
so that nothing meant for another life or another group is ever taken for ours. What a message *does* is
decided in `raft.core`; this module is apart so that a transport can carry messages without knowing the
protocol.

The payload of an `Append` is not part of the struct: the struct says how many entries belong to it, and the
transport carries their frames behind it, untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

# Terms, indexes and ids are far below: so what is counted up from one fits the 64 bits of wire and disk.
NUMBER_LIMIT = 2**62
Natural = Annotated[int, msgspec.Meta(ge=0, lt=NUMBER_LIMIT)]


class ProtocolError(ValueError):
    """A peer sent something that is not a message of this protocol."""


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every message carries. `cluster` and `group` are 128-bit ids, replica ids start at 1."""

    cluster: bytes
    group: bytes
    sender: Natural
    receiver: Natural
    incarnation: Natural
    term: Natural


class PreVote(Message, frozen=True, tag=1):
    """Would you vote for me in `term` (one above my own)? Changes nothing at the receiver."""

    last_index: Natural
    last_term: Natural


class PreVoteAnswer(Message, frozen=True, tag=2):
    """A grant carries the term that was asked for, a refusal the voter's own."""

    granted: bool
    recovering: bool = False


class Vote(Message, frozen=True, tag=3):
    """A candidate asks for a vote in `term`. `transfer`: the leader itself told it to stand."""

    last_index: Natural
    last_term: Natural
    transfer: bool = False


class VoteAnswer(Message, frozen=True, tag=4):
    """`recovering`: the voter may have forgotten something, so its grant counts less."""

    granted: bool
    recovering: bool = False


class Append(Message, frozen=True, tag=5):
    """`entry_count` entries that follow the one at (`prev_index`, `prev_term`); zero entries make a probe.

    `goal` and `receiver_incarnation` say how far the receiver, in that incarnation, must match with this
    leader before it may be trusted again after a possible loss.
    """

    prev_index: Natural
    prev_term: Natural
    commit: Natural
    entry_count: Natural
    goal: Natural = 0
    receiver_incarnation: Natural = 0


class AppendAnswer(Message, frozen=True, tag=6):
    """Accepted: everything up to `match_index` is durable here and equal to the leader's log. With a hint it
    is so because it is committed here, and its entry at `hint_index` has `hint_term`.

    Rejected: we do not have (`prev_index`, its term). The last entry that can be common is at or below
    `hint_index`, which has `hint_term` in our log.
    """

    match_index: Natural
    rejected: bool = False
    prev_index: Natural = 0
    hint_index: Natural = 0
    hint_term: Natural = 0


class Heartbeat(Message, frozen=True, tag=7):
    """A sign of life with the commit index. `round` 0 is a mere commit notice, which wants no answer.

    `quiesce`: the group has nothing to do; if the receiver agrees, no more heartbeats come. (`held_index`,
    `held_term`): the last entry that the receiver, in `receiver_incarnation`, has acknowledged to this
    leader; 0 if none is known.
    """

    commit: Natural
    round: Natural
    goal: Natural = 0
    receiver_incarnation: Natural = 0
    quiesce: bool = False
    held_index: Natural = 0
    held_term: Natural = 0


class HeartbeatAnswer(Message, frozen=True, tag=8):
    """When round `round` reached us, `term` was the highest term we knew.

    Round 0 answers no heartbeat: it tells an old leader of our term, or a quiet one that we are awake.
    `quiesce`: we hold all that the leader holds, know it committed, and need no more heartbeats.
    `match_index`: up to there we know our log to be the leader's; less than we acknowledged, if we have begun
    anew since.
    """

    round: Natural
    quiesce: bool = False
    match_index: Natural = 0


class TimeoutNow(Message, frozen=True, tag=9):
    """The leader hands over: stand for election at once, without a pre-vote."""


AnyMessage = (
    PreVote
    | PreVoteAnswer
    | Vote
    | VoteAnswer
    | Append
    | AppendAnswer
    | Heartbeat
    | HeartbeatAnswer
    | TimeoutNow
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyMessage])


def encode(messages: Sequence[AnyMessage]) -> bytes:
    """All messages as one MessagePack array; the inverse of `decode`."""
    return _encoder.encode(messages)


def decode(payload: bytes | bytearray | memoryview) -> list[AnyMessage]:
    """The messages in `payload`, which must hold exactly one array. Raises `ProtocolError`."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a list of raft messages: {error}") from error
