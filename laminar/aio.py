"""The client for programs with an event loop: ``async with laminar.aio.connect(url) as client``."""

from __future__ import annotations

from laminar.client.client import Client, connect
from laminar.client.consume.large_values import Value
from laminar.client.consume.reader import Reader
from laminar.client.consume.subscription import Subscription
from laminar.client.produce.datagrams import Datagrams
from laminar.client.produce.producer import Delivery, Producer
from laminar.client.records import (
    PartitionInfo,
    ReadBatch,
    Receipt,
    Record,
    SinkInfo,
    Staged,
    TopicInfo,
    Trimmed,
)
from laminar.client.topic import Topic
from laminar.client.transact.sinks import Sink, Stager, Transaction

__all__ = [
    "Client",
    "Datagrams",
    "Delivery",
    "PartitionInfo",
    "Producer",
    "ReadBatch",
    "Reader",
    "Receipt",
    "Record",
    "Sink",
    "SinkInfo",
    "Staged",
    "Stager",
    "Subscription",
    "Topic",
    "TopicInfo",
    "Transaction",
    "Trimmed",
    "Value",
    "connect",
]
