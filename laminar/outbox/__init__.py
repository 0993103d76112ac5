"""Transactional outbox: for each committed row of an application's own table, a record is appended.

The application inserts a row into a table, in the transaction that makes its change. A `Relay`, in a process
of its own, appends committed rows to a topic, each once, and deletes them. ``python -m laminar.outbox
postgresql`` prints the SQL that creates the tables. `docs/outbox.md` has the guarantees and the reasons.
"""

from __future__ import annotations

from laminar.outbox.relay import BadRow, Relay
from laminar.outbox.schema import schema

__all__ = ["BadRow", "Relay", "schema"]
