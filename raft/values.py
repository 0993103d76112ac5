"""The values that pass between the core and its driver: entries, places, settings, and `Ready`.

They are apart from `raft.core` so that a driver, a log adapter and the tests can name them without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import msgspec

from raft.configuration import Configuration
from raft.messages import AnyMessage, Append


class Role(Enum):
    """The role of a replica (paper 5.1, thesis 9.6). A learner has the role of a follower."""

    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


class Entry(msgspec.Struct, frozen=True):
    """One entry of the log. The core does not interpret `data`; `size` is its length in bytes."""

    index: int
    term: int
    data: Any
    size: int
    configuration: Configuration | None = None


class HardState(msgspec.Struct, frozen=True):
    """Term and vote, which must survive a crash like the log. `vote` is 0 if there is none in this term."""

    term: int = 0
    vote: int = 0


class Place(msgspec.Struct, frozen=True):
    """The numbers that the leader writes into its next entry.

    `index` and `term` are those of that entry, `prev_term` is the term of the entry before it, and
    `committed_index` the present commit index.
    """

    index: int
    term: int
    prev_term: int
    committed_index: int


class LogView(Protocol):
    """The replica's log as its driver keeps it in memory; always current between two inputs.

    `term(first_index - 1)` is known (0 for a log that starts at 1); below that and above `last_index` it is
    None.
    """

    @property
    def first_index(self) -> int:
        """The index of the first entry that is kept."""

    @property
    def last_index(self) -> int:
        """The index of the last entry."""

    @property
    def last_term(self) -> int:
        """The term of the last entry."""

    def term(self, index: int, /) -> int | None:
        """Return the term of an entry; None if it is not kept."""

    def size(self, index: int, /) -> int:
        """Return the size of an entry in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a core. Election timeouts are drawn from `election_timeout_ms` to twice that.

    An append is sent to a replica only while the replica has fewer than `max_inflight_appends` appends, with
    less than `max_inflight_bytes`, to answer. A proposal is taken only if it and all that is not committed
    yet are within `max_uncommitted_bytes`; if nothing waits, any proposal is taken. An entry above
    `max_entry_bytes` is never taken: no message could carry it, and a leader that held it would commit
    nothing more.
    """

    election_timeout_ms: int = 1500
    heartbeat_ms: int = 200
    max_append_bytes: int = 1 << 20
    max_inflight_bytes: int = 8 << 20
    max_inflight_appends: int = 256
    max_uncommitted_bytes: int = 64 << 20
    max_entry_bytes: int = 63 << 20


class NotLeader(Exception):
    """This replica does not lead, or hands over; `.leader_id` is a hint, 0 if unknown."""

    def __init__(self, leader_id: int) -> None:
        super().__init__(f"not the leader; the leader may be replica {leader_id}")
        self.leader_id = leader_id


class TooMuchUncommitted(Exception):
    """Too many bytes are not committed yet: try again when some are."""

    def __init__(self, *, uncommitted_bytes: int, proposed_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{uncommitted_bytes} bytes wait to be committed, and {proposed_bytes} more exceed the limit of "
            f"{limit_bytes}"
        )
        self.uncommitted_bytes = uncommitted_bytes
        self.proposed_bytes = proposed_bytes
        self.limit_bytes = limit_bytes


class EntryTooLarge(Exception):
    """A proposed entry exceeds `max_entry_bytes`; nothing was appended."""

    def __init__(self, *, entry_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"an entry of {entry_bytes} bytes; the limit is {limit_bytes}")
        self.entry_bytes = entry_bytes
        self.limit_bytes = limit_bytes


Trace = Callable[[str, Mapping[str, object]], None]
MakeNoop = Callable[[Place], Entry]


class SendAppend(msgspec.Struct, frozen=True):
    """An order to send `message` with entries `first_index` to `last_index`; none if first > last.

    If the driver can't read those frames any more it drops the message, as any message may be lost.
    """

    message: Append
    first_index: int
    last_index: int


class Became(msgspec.Struct, frozen=True):
    """The new role, term and leader, given after one of them changed; `leader_id` is 0 if unknown."""

    role: Role
    term: int
    leader_id: int


class Written(msgspec.Struct, frozen=True):
    """The end of the log as the driver has it in memory, to be given to `persisted` when it is on disk.

    `index` and `term` are those of the last entry, `truncations` says how often entries that a `Ready` had
    handed out were truncated before.
    """

    index: int
    term: int
    truncations: int


class Ready(msgspec.Struct, frozen=True):
    """The actions that the driver must perform after an input, in this order.

    1. Truncate the log from entry `truncate_from` on, append `entries`, and record `hard_state`: in memory at
       once, before the next input; on disk with the next sync.
    2. Send `messages` and `appends`, at any time from now on. They promise nothing about our disk.
    3. Send `messages_after_sync` when a sync that covers step 1 of this Ready *and of all before it* is done,
       also if this Ready has nothing to write: the messages promise what an earlier Ready may have written.
    4. When that sync is done, call `persisted` with `written` of the last Ready that it covers.

    `committed_index` is the new commit index. `reads` are pairs (context, index), where index is the commit
    index of the group at some instant after the request. `reads_failed` are the contexts of requests to be
    sent again to another replica. `recovered` says: record, with the next sync, that this replica is no
    longer recovering; a crash before that only leaves it recovering. `written` is the log's end after step 1.
    `place` is `Core.place()`, None if proposals are not accepted here. `quiesced` is `Core.quiesced`.
    """

    hard_state: HardState | None = None
    truncate_from: int | None = None
    entries: Sequence[Entry] = ()
    messages: Sequence[AnyMessage] = ()
    messages_after_sync: Sequence[AnyMessage] = ()
    appends: Sequence[SendAppend] = ()
    reads: Sequence[tuple[int, int]] = ()
    reads_failed: Sequence[int] = ()
    committed_index: int | None = None
    became: Became | None = None
    configuration: Configuration | None = None
    recovered: bool = False
    written: Written = Written(0, 0, 0)
    place: Place | None = None
    quiesced: bool = False
