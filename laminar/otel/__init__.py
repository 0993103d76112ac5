"""Laminar and OpenTelemetry (docs/trace.md): traces of a program that go on in its records, and back.

It needs the extra `otel`; what is missing is said when it is used. The trace of records as spans is in
`laminar.otel.export`, for `laminar trace export`.
"""

from __future__ import annotations

from laminar.otel.instrumentation import context_of, instrument

__all__ = ["context_of", "instrument"]
