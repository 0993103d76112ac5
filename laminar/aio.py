"""The client for programs with an event loop: ``async with laminar.aio.connect(url) as client``."""

from __future__ import annotations

from laminar.client.client import Client, connect
from laminar.client.consume.channel import Channel
from laminar.client.consume.group.subscription import Subscription
from laminar.client.consume.jobs import Job
from laminar.client.consume.large_values import Value
from laminar.client.consume.reader import Reader
from laminar.client.delayed import DelayedCount, DelayedRecord, DelayedState
from laminar.client.descriptions import AsideInfo, PartitionInfo, SinkInfo, TopicInfo, Trimmed
from laminar.client.history import RecordEvent, RecordHistory
from laminar.client.produce.datagrams import Datagrams
from laminar.client.produce.producer import Delivery, Producer
from laminar.client.records import ReadBatch, Receipt, Record, Settled, Staged
from laminar.client.search import FoundRecord, NotSearched, Search
from laminar.client.topic import Topic
from laminar.client.trace import RecordTrace, TraceEvent
from laminar.client.transact.sinks import Sink, Stager, Transaction

__all__ = [
    "AsideInfo",
    "Channel",
    "Client",
    "Datagrams",
    "DelayedCount",
    "DelayedRecord",
    "DelayedState",
    "Delivery",
    "FoundRecord",
    "Job",
    "NotSearched",
    "PartitionInfo",
    "Producer",
    "ReadBatch",
    "Reader",
    "Receipt",
    "Record",
    "RecordEvent",
    "RecordHistory",
    "RecordTrace",
    "Search",
    "Settled",
    "Sink",
    "SinkInfo",
    "Staged",
    "Stager",
    "Subscription",
    "Topic",
    "TopicInfo",
    "TraceEvent",
    "Transaction",
    "Trimmed",
    "Value",
    "connect",
]
