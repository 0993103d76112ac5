"""A check that the libraries of the extra `otel` are installed."""

from __future__ import annotations

from laminar.client.errors import ConfigError


def check_installed() -> None:
    """Raise `ConfigError` if the libraries of the extra `otel` are not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401  # optional: asked for before it is used
    except ImportError as missing:
        raise ConfigError(
            f"this needs OpenTelemetry ({missing})",
            code="missing_extra",
            field="extra",
            value="otel",
            hint="pip install 'laminar-mq[otel]'",
        ) from None
