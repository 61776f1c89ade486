"""The result of a scrape, read with Prometheus' own parsers."""

import urllib.request
from collections.abc import Callable, Iterable

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

TTFT_PARTS = ("gateway", "queue", "failed_attempts", "worker_queue", "transfer_exposed", "prefill")


class Scrape:
    """One answer of `/metrics`."""

    def __init__(
        self, text: str, parse: Callable[[str], Iterable[Metric]] = text_string_to_metric_families
    ) -> None:
        families = list(parse(text))
        self.families = {
            family.name + ("_total" if family.type == "counter" else "")
            for family in families
            if family.name.startswith("baton_")
        }
        """The names of counters include `_total`."""
        self._samples = [sample for family in families for sample in family.samples]
        self.names = {sample.name for sample in self._samples}

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name with these labels. The name is given without `baton_`."""
        wanted = labels.items()
        return sum(s.value for s in self._samples if s.name == f"baton_{name}" and wanted <= s.labels.items())


def read_url(url: str, accept: str = "") -> str:
    """Reads a URL. This blocks, and fails after a minute without data."""
    request = urllib.request.Request(url, headers={"accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: bytes = answer.read()
        return body.decode()
