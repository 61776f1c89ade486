"""GatewayMetrics: series that exist before their first event, and callers in labels."""

import pytest

from gateway.telemetry.metrics import GatewayMetrics


@pytest.mark.parametrize("error", ["Internal", "KeysUnavailable"])
def test_errors_of_urgent_alerts_are_counted_from_the_start(error: str) -> None:
    """A rate sees no increase in the first value of a series."""
    text = GatewayMetrics("tiny", 64).render("")[0].decode()
    for api in ("grpc", "http"):
        assert f'baton_call_errors_total{{api="{api}",caller="",error="{error}"}} 0.0' in text
