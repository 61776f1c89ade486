"""Creates the trace exporter if configured and installed; the only module that imports tracing.py."""

from typing import TYPE_CHECKING

from baton.config import GatewayConfig
from baton.errors import ConfigError

if TYPE_CHECKING:
    from gateway.telemetry.tracing import Tracing


def tracing_for(config: GatewayConfig, model_name: str, instance: str) -> "Tracing | None":
    """The trace exporter, or None. Raises ConfigError if OpenTelemetry is needed but not installed, or cannot export
    traces."""
    if config.otlp_endpoint is None:
        return None
    try:
        from gateway.telemetry.tracing import Tracing  # an optional extra
    except ImportError as error:
        raise ConfigError(
            f"gateway.otlp_endpoint ({config.otlp_endpoint}) needs OpenTelemetry, but {error.name} is not "
            "installed; install Baton with its extra: pip install 'baton[otel]'"
        ) from None
    try:
        return Tracing(config.otlp_endpoint, config.trace_sample_ratio, model_name, instance)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"OpenTelemetry cannot export traces, perhaps because of an environment variable (OTEL_...): {error}"
        ) from error


def check_tracing(config: GatewayConfig) -> None:
    """Raises ConfigError in the cases in which `tracing_for` would."""
    if (tracing := tracing_for(config, "", "")) is not None:
        tracing.close()
