"""Exposition: each reader gets the format that it accepts, else the text format; large counters read like others."""

import pytest
from prometheus_client import CollectorRegistry

from baton.system.exposition import CollectedOnDemand, LargeCounter, counter, render


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text; version=1.0.0"),
        ("text/plain; version=1.0.0", "text/plain; version=1.0.0"),
        ("", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=zz", "text/plain; version=0.0.4"),
        ("text/plain;version=1.x", "text/plain; version=0.0.4"),
    ],
)
def test_each_accept_header_gets_an_answer(accept: str, content_type: str) -> None:
    body, its_type = render(CollectorRegistry(), accept)
    assert its_type.startswith(content_type)
    assert body.endswith(b"# EOF\n") is content_type.startswith("application/openmetrics-text")


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_a_large_counter_reads_like_any_other(accept: str) -> None:
    values: dict[tuple[str, ...], int] = {
        ("http", 'a "b"\n\u2028\\'): 3,
        ("grpc", ""): 0,
        ("grpc", "c"): 2_000_000,
    }
    usual, large = CollectorRegistry(), LargeCounter("calls", "Ended calls", ["api", "caller"])
    usual.register(
        CollectedOnDemand(lambda: [counter("calls", "Ended calls", ["api", "caller"], {**values})])
    )
    for label_values, number in values.items():
        large.add(0, *label_values)
        large.add(number, *label_values)
    expected = render(usual, accept)[0].replace(b"2e+06", b"2000000.0")
    assert render(CollectorRegistry(), accept, [large])[0] == expected
