"""Records that are appended because a row was committed: the outbox of an application's own database.

The application inserts a row into a table, in the transaction that makes its change. A `Relay`, in a process
of its own, appends what is committed to a topic, each row once, and deletes it. ``python -m laminar.outbox
postgresql`` prints the tables. `docs/outbox.md` says what holds, and why.
"""

from __future__ import annotations

from laminar.outbox.relay import BadRow, Relay
from laminar.outbox.schema import schema

__all__ = ["BadRow", "Relay", "schema"]
