"""Checks of what clients saw: pure functions over a history, which name every anomaly and guess nothing.

Beside `laminar.testing.history`, which compares receipts with everything read back. `anomalies` goes over a
history of operations (`operations`) after Jepsen's kafka workload: lost, duplicate, reordered, inconsistent
offsets, polls that go back or skip; `linear` decides in O(n log n) whether the offsets of a history can be
those of one log in real time; `transactions` compares what drivers of sinks were told with what is there;
`channels` what consumers of a channel were given with what channels promise.
"""

from __future__ import annotations

from laminar.testing.history import (
    Key,
    Kind,
    Read,
    Sent,
    Violation,
    check_history,
    check_replicas,
)
from tests.checkers.anomalies import check_operations
from tests.checkers.linear import check_linear
from tests.checkers.operations import Fault, History, Operation
from tests.checkers.transactions import Attempt, Begun, check_transactions

__all__ = [
    "Attempt",
    "Begun",
    "Fault",
    "History",
    "Key",
    "Kind",
    "Operation",
    "Read",
    "Sent",
    "Violation",
    "check_history",
    "check_linear",
    "check_operations",
    "check_replicas",
    "check_transactions",
]
