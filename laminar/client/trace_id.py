"""The trace id of a record: from a program's argument to the 16 bytes in a batch."""

from __future__ import annotations

from laminar.client.errors import ConfigError

TraceId = str | bytes
"""32 hexadecimal digits, as in a ``traceparent`` header, or the 16 bytes that they stand for."""

TRACE_ID_BYTES = 16


def trace_id_bytes(trace_id: TraceId | None) -> bytes | None:
    """Return the 16 bytes of a trace id; None without one. Raises `ConfigError` if it is malformed."""
    if trace_id is None:
        return None
    found: object = trace_id
    if isinstance(trace_id, str):
        try:
            found = bytes.fromhex(trace_id) if len(trace_id) == 2 * TRACE_ID_BYTES else b""
        except ValueError:
            found = b""
    if not isinstance(found, bytes) or len(found) != TRACE_ID_BYTES:
        raise ConfigError(
            "trace_id: a trace id is 32 hexadecimal digits, or 16 bytes",
            code="bad_trace_id",
            field="trace_id",
            value=trace_id,
            limit=2 * TRACE_ID_BYTES if isinstance(trace_id, str) else TRACE_ID_BYTES,
        )
    return found
