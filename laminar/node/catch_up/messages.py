"""The calls between the two sides of a catch-up.

The leader *offers*; the replica's shard then asks for the log's *beginning*, and for *pieces* from an entry
on, until it has what was committed. Every answer is self-contained, so either side may restart in between,
and a piece may as well come from a replica that has ceased to lead: what is committed stays so.
"""

from __future__ import annotations

import msgspec

OFFER = "catch_up_offer"
BEGINNING = "catch_up_beginning"
PIECE = "catch_up_piece"

# A piece on the wire: small enough that another call waits only a few milliseconds for it.
PIECE_BYTES = 256 * 1024

# Codes of refusals: the source does not hold these entries (any more), or holds them damaged.
GONE = "gone"
DAMAGED = "damaged"


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """The leader of `term`, replica `sender`, tells replica `receiver` that it needs a new log."""

    group: bytes
    sender: int
    receiver: int
    term: int


class OfferAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to an offer: the new log is being built (`working`), or `detail` says why not."""

    working: bool
    detail: str = ""


class BeginningRequest(msgspec.Struct, frozen=True, array_like=True):
    """Replica `receiver` asks where the source's log begins, and how far it is committed."""

    group: bytes
    receiver: int


class Beginning(msgspec.Struct, frozen=True, array_like=True):
    """The entry before the log's first, as `Log.set_start` takes it, and the last committed entry.

    `size_bytes` is that of the whole log, for the progress shown.
    """

    index: int
    term: int
    offset: int
    time_ms: int
    committed_index: int
    size_bytes: int


class PieceRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request for committed frames from entry `index` on; `verified` has each checked at the source."""

    group: bytes
    receiver: int
    index: int
    verified: bool = False
