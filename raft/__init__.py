"""The Raft protocol as a pure core: no I/O, no clock, no randomness of its own. Start at `raft.core`."""

from __future__ import annotations

from raft.configuration import Configuration, ConfigurationRefused
from raft.core import Core
from raft.messages import AnyMessage, Append, ProtocolError, decode, encode
from raft.progress import Progress
from raft.values import (
    Became,
    Entry,
    EntryTooLarge,
    HardState,
    LogView,
    NotLeader,
    Place,
    Ready,
    Role,
    SendAppend,
    Settings,
    TooMuchUncommitted,
    Written,
)

__all__ = [
    "AnyMessage",
    "Append",
    "Became",
    "Configuration",
    "ConfigurationRefused",
    "Core",
    "Entry",
    "EntryTooLarge",
    "HardState",
    "LogView",
    "NotLeader",
    "Place",
    "Progress",
    "ProtocolError",
    "Ready",
    "Role",
    "SendAppend",
    "Settings",
    "TooMuchUncommitted",
    "Written",
    "decode",
    "encode",
]
