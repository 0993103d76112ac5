"""Three objects that the parts of a core share: identity, effects of the next `Ready`, and tracer.

`Following`, `Leadership` and `Candidacy` share these objects: they put their results there, and need not know
each other.
"""

from __future__ import annotations

from raft.messages import AnyMessage
from raft.values import SendAppend, Trace


class Identity:
    """The ids of this replica, with which each of its messages begins."""

    __slots__ = ("cluster", "group", "incarnation", "replica_id")

    def __init__(self, cluster: bytes, group: bytes, replica_id: int, incarnation: int) -> None:
        self.cluster = cluster
        self.group = group
        self.replica_id = replica_id
        self.incarnation = incarnation

    def head_to(self, receiver: int) -> tuple[bytes, bytes, int, int, int]:
        """Return the first fields of a message to `receiver`; its term comes next."""
        return self.cluster, self.group, self.replica_id, receiver, self.incarnation


class Tracer:
    """Counts the inputs that were ignored, and passes events on to the driver's trace, if it has one."""

    __slots__ = ("dropped", "trace")

    def __init__(self, trace: Trace | None) -> None:
        self.trace = trace
        # Messages and completions that were not acted upon, by reason.
        self.dropped: dict[str, int] = {}

    def drop(self, reason: str, message: AnyMessage) -> None:
        """Count a message that is ignored, by `reason`, and pass that on to the trace."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.note("dropped", reason=reason, message=message)

    def note(self, event: str, **details: object) -> None:
        """Pass an event of the core, with its details, on to the driver's trace, if it has one."""
        if self.trace is not None:
            self.trace(event, details)


class Effects:
    """Collects messages, appends and reads for the next `Ready`, in fields of the same names.

    `after_sync` is `messages_after_sync`. `Core.take_ready` hands out each list once. The `Ready`'s entries
    come from the log, its hard state from the candidacy.
    """

    __slots__ = ("after_sync", "appends", "messages", "reads", "reads_failed")

    messages: list[AnyMessage]
    after_sync: list[AnyMessage]
    appends: list[SendAppend]
    reads: list[tuple[int, int]]
    reads_failed: list[int]

    def __init__(self) -> None:
        self.messages = []
        self.after_sync = []
        self.appends = []
        self.reads = []
        self.reads_failed = []
