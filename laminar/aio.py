"""The client for programs with an event loop: ``async with laminar.aio.connect(url) as client``."""

from __future__ import annotations

from laminar.client.client import Client, connect
from laminar.client.producer import Delivery, Producer
from laminar.client.reader import Reader
from laminar.client.records import PartitionInfo, ReadBatch, Receipt, Record, TopicInfo
from laminar.client.topic import Topic

__all__ = [
    "Client",
    "Delivery",
    "PartitionInfo",
    "Producer",
    "ReadBatch",
    "Reader",
    "Receipt",
    "Record",
    "Topic",
    "TopicInfo",
    "connect",
]
