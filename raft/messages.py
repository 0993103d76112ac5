"""The messages of the protocol, and their form on the wire.

Every message names its cluster, its group, both replica ids, the sender's incarnation and the sender's term,
so that nothing meant for another incarnation or another group is ever taken for ours. What a message *does*
is decided in `raft.core`; a transport can carry messages with this module alone.

The payload of an `Append` is not part of the struct: the struct says how many entries belong to it, and the
transport carries their frames after it, untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

# The limit of numbers in messages. Terms, indexes and ids stay far below it, and a number that is made by
# counting up from a received one still fits the 64 bits of wire and disk.
NUMBER_LIMIT = 2**62
Natural = Annotated[int, msgspec.Meta(ge=0, lt=NUMBER_LIMIT)]


class ProtocolError(ValueError):
    """A peer sent something that is not a message of this protocol."""


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields of every message. `cluster` and `group` are 128-bit ids, replica ids start at 1."""

    cluster: bytes
    group: bytes
    sender: Natural
    receiver: Natural
    incarnation: Natural
    term: Natural


class PreVote(Message, frozen=True, tag=1):
    """Asks whether the receiver would vote for the sender in `term`, the sender's next; changes nothing."""

    last_index: Natural
    last_term: Natural


class PreVoteAnswer(Message, frozen=True, tag=2):
    """Answers a pre-vote. The term of a grant is the one asked for, that of a refusal the voter's own.

    `recovering` as in `VoteAnswer`.
    """

    granted: bool
    recovering: bool = False


class Vote(Message, frozen=True, tag=3):
    """Asks for a vote in `term`. `transfer` says that the leader itself hands over to the sender."""

    last_index: Natural
    last_term: Natural
    transfer: bool = False


class VoteAnswer(Message, frozen=True, tag=4):
    """Grants or refuses a vote. A `recovering` voter may have forgotten something: its grant is void."""

    granted: bool
    recovering: bool = False


class Append(Message, frozen=True, tag=5):
    """An append of the `entry_count` entries after the one at (`prev_index`, `prev_term`).

    With `entry_count` 0 it is a probe: it asks whether the receiver holds the entry at `prev_index`.

    `goal` and `receiver_incarnation` say how far the receiver, in that incarnation, must match with this
    leader before its recovery may end.
    """

    prev_index: Natural
    prev_term: Natural
    commit: Natural
    entry_count: Natural
    goal: Natural = 0
    receiver_incarnation: Natural = 0


class AppendAnswer(Message, frozen=True, tag=6):
    """A follower's answer to an append: it accepts or rejects it.

    Accepted: everything up to `match_index` is durable at the sender and equal to the leader's log. If
    `hint_index` is set (it then equals `match_index`), the sender has not compared these entries with the
    append, but knows that they are committed. The sender's entry at `hint_index` has the term `hint_term` (0:
    it is damaged), by which the leader can check that.

    Rejected: the sender's log does not have the append's (`prev_index`, `prev_term`). The last entry that
    both logs can have in common is at or below `hint_index`, whose term in the sender's log is `hint_term`.
    """

    match_index: Natural
    rejected: bool = False
    prev_index: Natural = 0
    hint_index: Natural = 0
    hint_term: Natural = 0


class Heartbeat(Message, frozen=True, tag=7):
    """A leader's sign of life with the commit index; `round` 0 is only a commit notice, without answer.

    `quiesce` asks the receiver to quiesce: if it agrees, no more heartbeats come. (`held_index`, `held_term`)
    is the last entry that the receiver, in `receiver_incarnation`, has acknowledged to this leader; 0 if none
    is known.
    """

    commit: Natural
    round: Natural
    goal: Natural = 0
    receiver_incarnation: Natural = 0
    quiesce: bool = False
    held_index: Natural = 0
    held_term: Natural = 0


class HeartbeatAnswer(Message, frozen=True, tag=8):
    """Tells that `term` was the highest term the sender knew when round `round` reached it.

    With round 0 it answers no heartbeat: it announces a later term to an old leader, or tells a quiesced
    leader that the sender is awake. `quiesce` says that the sender holds all that the leader holds, knows it
    committed, and needs no more heartbeats. `match_index` is the index up to which the sender knows its log
    to match the leader's; it is less than what it acknowledged, if it was restarted since.
    """

    round: Natural
    quiesce: bool = False
    match_index: Natural = 0


class TimeoutNow(Message, frozen=True, tag=9):
    """Hands leadership over: the receiver campaigns at once, without a pre-vote (thesis 3.10)."""


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
    """Return all messages as one MessagePack array; the inverse of `decode`."""
    return _encoder.encode(messages)


def decode(payload: bytes | bytearray | memoryview) -> list[AnyMessage]:
    """Return the messages in `payload`, which must hold exactly one array.

    Raises:
        ProtocolError: `payload` is not one array of valid messages.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a list of raft messages: {error}") from error
