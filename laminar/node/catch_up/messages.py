"""The calls between the two sides of a catch-up.

The leader *offers* a catch-up. The replica's shard then asks the same node for the *beginning* of the log,
and for *pieces*, each from a given entry on, until it has every entry that was committed when it asked for
the beginning. Every answer is self-contained, so either side may restart in between. The source may cease to
lead meanwhile: what it knows to be committed stays committed.
"""

from __future__ import annotations

import msgspec

OFFER = "catch_up_offer"
BEGINNING = "catch_up_beginning"
PIECE = "catch_up_piece"

# Bytes of a piece: few enough that another call on the connection waits only a few milliseconds for it. An
# entry that is larger is a piece of its own.
PIECE_BYTES = 256 * 1024

# Codes of the source's refusals: it does not hold these entries as committed ones; they are damaged there.
GONE = "gone"
DAMAGED = "damaged"


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """The leader's offer of a catch-up: replica `sender` leads in `term`, and `receiver` needs a new log."""

    group: bytes
    sender: int
    receiver: int
    term: int


class OfferAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to an offer: `working` if the new log is being built, else the reason in `detail`."""

    working: bool
    detail: str = ""


class BeginningRequest(msgspec.Struct, frozen=True, array_like=True):
    """Replica `receiver` asks where the source's log begins, and up to which entry it is committed."""

    group: bytes
    receiver: int


class Beginning(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of the source's log, and the index of its last committed entry.

    `index`, `term`, `offset` and `time_ms` are those that `Log.set_start` takes; `index` is the entry before
    the log's first, 0 if nothing was trimmed. `size_bytes` is that of the whole log, to show progress.
    """

    index: int
    term: int
    offset: int
    time_ms: int
    committed_index: int
    size_bytes: int


class PieceRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request for committed frames from entry `index` on.

    With `verified` the source checks each frame before it sends it; otherwise it may send a file's bytes.
    """

    group: bytes
    receiver: int
    index: int
    verified: bool = False
