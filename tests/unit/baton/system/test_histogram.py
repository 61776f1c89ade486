"""Histogram: every value is in one bucket, and the counts are those of Prometheus' own histogram."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PrometheusHistogram

from baton.system.exposition import CollectedOnDemand, histogram, render
from baton.system.histogram import Histogram

BOUNDS = (0.001, 0.5, 1.0, 20.0)


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0.0, 100.0))))
def test_it_counts_and_exports_like_the_prometheus_client(values: list[float]) -> None:
    theirs = CollectorRegistry()
    model = PrometheusHistogram("baton_x", "meaning", ["a"], registry=theirs, buckets=BOUNDS).labels("b")
    ours = Histogram(BOUNDS)
    ours.add_all(values[::2])
    for value in values[1::2]:
        ours.add(value)
    for value in values:
        model.observe(value)
    registry = CollectorRegistry()
    registry.register(CollectedOnDemand(lambda: [histogram("x", "meaning", ["a"], {("b",): ours.counts()})]))

    def lines(registry: CollectorRegistry) -> list[str]:
        return [line for line in render(registry, "")[0].decode().splitlines() if "_created" not in line]

    *counts, total = lines(registry)
    *expected, expected_total = lines(theirs)
    assert counts == expected
    assert float(total.split()[-1]) == pytest.approx(float(expected_total.split()[-1]))
