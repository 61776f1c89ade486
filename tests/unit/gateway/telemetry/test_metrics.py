"""GatewayMetrics: series that exist before their first event, and callers in labels."""

import pytest

from gateway.telemetry import metrics
from gateway.telemetry.call_log import CallError
from gateway.telemetry.metrics import GatewayMetrics
from tests.factories.metrics import Scrape


def call_error(caller: str | None) -> CallError:
    return CallError(api="http", error="NotFound", caller=caller, call="GET /x", request_id="r")


def scrape(counted: GatewayMetrics) -> Scrape:
    return Scrape(counted.render("")[0].decode())


@pytest.mark.parametrize("error", ["Internal", "KeysUnavailable"])
def test_errors_of_urgent_alerts_are_counted_from_the_start(error: str) -> None:
    """A rate sees no increase in the first value of a series."""
    text = GatewayMetrics("tiny", 64).render("")[0].decode()
    for api in ("grpc", "http"):
        assert f'baton_call_errors_total{{api="{api}",caller="",error="{error}"}} 0.0' in text


def test_a_call_without_a_caller_takes_no_callers_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_CALLERS", 1)
    counted = GatewayMetrics("tiny", 64)
    for caller in (None, "alice", "bob", None):
        counted.call_failed(call_error(caller))
    now = scrape(counted)
    numbers = {
        caller: now("call_errors_total", error="NotFound", caller=caller)
        for caller in ("", "alice", metrics.OTHERS)
    }
    assert numbers == {"": 2, "alice": 1, metrics.OTHERS: 1}


def test_series_of_callers_cost_a_scrape_next_to_nothing() -> None:
    """The registry takes 20 us for each of its series, on the gateway's event loop: 256 callers have thousands."""
    counted = GatewayMetrics("tiny", 64)
    num_of_registry = sum(len(family.samples) for family in counted.registry.collect())
    for number in range(metrics.MAX_CALLERS):
        counted.call_failed(call_error(f"caller{number}"))
    assert sum(len(family.samples) for family in counted.registry.collect()) == num_of_registry
    assert scrape(counted)("call_errors_total", error="NotFound") == metrics.MAX_CALLERS
