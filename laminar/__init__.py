"""Laminar: a replicated log and message queue.

This module only maps names to modules. Every name below is imported when it is
first used, so that ``import laminar`` stays cheap and imports neither the server
nor any optional library; `tests/client/test_import.py` checks that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from laminar import aio, log, once, otel, outbox, testing
    from laminar.client import errors
    from laminar.client.codecs import Codec, json
    from laminar.client.delayed import DelayedCount, DelayedRecord, DelayedState
    from laminar.client.descriptions import (
        AsideInfo,
        ChannelInfo,
        CursorInfo,
        PartitionInfo,
        RouteInfo,
        SinkInfo,
        TopicInfo,
        Trimmed,
    )
    from laminar.client.errors import (
        AlreadyExists,
        AuthError,
        ConfigError,
        Error,
        Fenced,
        Forbidden,
        Late,
        NotDrained,
        NotFound,
        OffsetExpired,
        OutcomeUnknown,
        Overloaded,
        PreconditionFailed,
        ProduceError,
        Retry,
        Sealed,
        TimedOut,
        Unauthorized,
        Unavailable,
        Undelivered,
        Unreadable,
        Untrusted,
    )
    from laminar.client.history import RecordEvent, RecordHistory
    from laminar.client.records import ReadBatch, Receipt, Record, Settled, Staged
    from laminar.client.search import FoundRecord, NotSearched
    from laminar.client.sync.channel import Channel, Job
    from laminar.client.sync.client import Client, connect
    from laminar.client.sync.datagrams import Datagrams
    from laminar.client.sync.large_values import Value
    from laminar.client.sync.producer import Delivery, Producer
    from laminar.client.sync.reader import Reader
    from laminar.client.sync.search import Search
    from laminar.client.sync.sinks import Sink, Stager, Transaction
    from laminar.client.sync.topic import Topic
    from laminar.client.trace import RecordTrace, TraceEvent
    from laminar.embedded import embed

# name -> (module, attribute); None as attribute: the module itself.
_HOMES: dict[str, tuple[str, str | None]] = {
    "aio": ("laminar.aio", None),
    "log": ("laminar.log", None),
    "embed": ("laminar.embedded", "embed"),
    "once": ("laminar.once", None),
    "otel": ("laminar.otel", None),
    "outbox": ("laminar.outbox", None),
    "testing": ("laminar.testing", None),
    "errors": ("laminar.client.errors", None),
    **{name: ("laminar.client.codecs", name) for name in ("Codec", "json")},
    **{
        name: ("laminar.client.errors", name)
        for name in (
            "AlreadyExists",
            "AuthError",
            "ConfigError",
            "Error",
            "Fenced",
            "Forbidden",
            "Late",
            "NotDrained",
            "NotFound",
            "OffsetExpired",
            "OutcomeUnknown",
            "Overloaded",
            "PreconditionFailed",
            "ProduceError",
            "Retry",
            "Sealed",
            "TimedOut",
            "Unauthorized",
            "Unavailable",
            "Undelivered",
            "Unreadable",
            "Untrusted",
        )
    },
    **{
        name: ("laminar.client.descriptions", name)
        for name in (
            "AsideInfo",
            "ChannelInfo",
            "CursorInfo",
            "PartitionInfo",
            "RouteInfo",
            "SinkInfo",
            "TopicInfo",
            "Trimmed",
        )
    },
    **{
        name: ("laminar.client.records", name)
        for name in ("ReadBatch", "Receipt", "Record", "Settled", "Staged")
    },
    **{name: ("laminar.client.sync.channel", name) for name in ("Channel", "Job")},
    **{name: ("laminar.client.sync.client", name) for name in ("Client", "connect")},
    "Datagrams": ("laminar.client.sync.datagrams", "Datagrams"),
    **{name: ("laminar.client.sync.producer", name) for name in ("Delivery", "Producer")},
    "Reader": ("laminar.client.sync.reader", "Reader"),
    **{name: ("laminar.client.sync.sinks", name) for name in ("Sink", "Stager", "Transaction")},
    **{name: ("laminar.client.delayed", name) for name in ("DelayedCount", "DelayedRecord", "DelayedState")},
    **{name: ("laminar.client.history", name) for name in ("RecordEvent", "RecordHistory")},
    **{name: ("laminar.client.trace", name) for name in ("RecordTrace", "TraceEvent")},
    **{name: ("laminar.client.search", name) for name in ("FoundRecord", "NotSearched")},
    "Search": ("laminar.client.sync.search", "Search"),
    "Topic": ("laminar.client.sync.topic", "Topic"),
    "Value": ("laminar.client.sync.large_values", "Value"),
    "Subscription": ("laminar.client.sync.subscription", "Subscription"),
}

__all__ = [
    "AlreadyExists",
    "AsideInfo",
    "AuthError",
    "Channel",
    "ChannelInfo",
    "Client",
    "Codec",
    "ConfigError",
    "CursorInfo",
    "Datagrams",
    "DelayedCount",
    "DelayedRecord",
    "DelayedState",
    "Delivery",
    "Error",
    "Fenced",
    "Forbidden",
    "FoundRecord",
    "Job",
    "Late",
    "NotDrained",
    "NotFound",
    "NotSearched",
    "OffsetExpired",
    "OutcomeUnknown",
    "Overloaded",
    "PartitionInfo",
    "PreconditionFailed",
    "ProduceError",
    "Producer",
    "ReadBatch",
    "Reader",
    "Receipt",
    "Record",
    "RecordEvent",
    "RecordHistory",
    "RecordTrace",
    "Retry",
    "RouteInfo",
    "Sealed",
    "Search",
    "Settled",
    "Sink",
    "SinkInfo",
    "Staged",
    "Stager",
    "Subscription",
    "TimedOut",
    "Topic",
    "TopicInfo",
    "TraceEvent",
    "Transaction",
    "Trimmed",
    "Unauthorized",
    "Unavailable",
    "Undelivered",
    "Unreadable",
    "Untrusted",
    "Value",
    "__version__",
    "aio",
    "connect",
    "embed",
    "errors",
    "json",
    "log",
    "once",
    "otel",
    "outbox",
    "testing",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'laminar' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(home[0])
    found = module if home[1] is None else getattr(module, home[1])
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
