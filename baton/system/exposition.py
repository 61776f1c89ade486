"""Baton's counts as Prometheus metric families, and a registry of these as text; knows no metric."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.system.histogram import HistogramCounts

PREFIX = "baton_"

Values = Mapping[tuple[str, ...], float]
"""A metric's values, by the values of its labels."""


class CollectedOnDemand(Collector):
    """Calls `collect` only when the metrics are read, so it costs nothing before."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def counter(name: str, meaning: str, labels: Sequence[str], values: Values) -> CounterMetricFamily:
    """A counter; `name` has no prefix and no `_total`."""
    family = CounterMetricFamily(PREFIX + name, meaning, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def gauge(name: str, meaning: str, labels: Sequence[str], values: Values) -> GaugeMetricFamily:
    """A gauge; `name` has no prefix."""
    family = GaugeMetricFamily(PREFIX + name, meaning, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def histogram(
    name: str, meaning: str, labels: Sequence[str], values: Mapping[tuple[str, ...], HistogramCounts]
) -> HistogramMetricFamily:
    """A histogram; `name` has no prefix."""
    family = HistogramMetricFamily(PREFIX + name, meaning, labels=labels)
    for label_values, counts in values.items():
        buckets = [(floatToGoString(bound), count) for bound, count in counts.cumulative()]
        family.add_metric(label_values, buckets, counts.total)
    return family


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """All metrics and their content type: the text format, or OpenMetrics if the reader accepts it."""
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:  # for a version that is no number
        encode, content_type = choose_encoder("")
    return encode(registry), content_type
