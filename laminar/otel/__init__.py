"""OpenTelemetry (docs/trace.md): traces that continue from a program into its records and back.

It needs the extra `otel`; a function that needs a missing library says so. The trace of records as spans is
in `laminar.otel.export`, for `laminar trace export`.
"""

from __future__ import annotations

from laminar.otel.instrumentation import context_of, instrument

__all__ = ["context_of", "instrument"]
