"""Every list of a worker's states names all of them."""

import re
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.fleet import ReplicaState
from baton.worker import WorkerRole, WorkerState
from cli.views import words
from gateway.telemetry import scrape
from gateway.telemetry.scrape import GatewayScrape
from gateway.workers.worker_listener import LossCause

ROOT = Path(__file__).parents[4]
STATES = {state.value for state in WorkerState}
SHOWN = STATES | {state.value for state in ReplicaState} - {ReplicaState.SERVING.value}
"""What a view of a worker may say. A worker whose controller says `serving` is shown as it reports itself."""


@pytest.mark.parametrize("seen", [None, *WorkerState])
def test_the_metric_has_a_series_for_every_state_and_counts_the_worker_in_its_own(
    monkeypatch: pytest.MonkeyPatch, seen: WorkerState | None
) -> None:
    monkeypatch.setattr(scrape, "_requests_on", lambda _: ())
    monkeypatch.setattr(scrape, "_blocks_of", lambda _: ())
    clients = [] if seen is None else [SimpleNamespace(state=seen, role=WorkerRole.DECODE)]
    workers: Any = SimpleNamespace(clients=clients, statuses=[], losses=dict.fromkeys(LossCause, 0))
    driver: Any = SimpleNamespace(workers=workers)
    family = next(iter(GatewayScrape(driver, "tiny", lambda: None)._workers()))
    found = {(sample.labels["role"], sample.labels["state"]): sample.value for sample in family.samples}
    expected = dict.fromkeys(((role.value, state) for role in WorkerRole for state in STATES), 0.0)
    assert found == expected | ({} if seen is None else {("decode", seen.value): 1.0})


def test_the_terminal_and_the_page_know_every_state() -> None:
    script = (files("gateway.http.page") / "cluster.js").read_text()
    marks = re.search(r"const MARKS = \{(.*?)\}", script, re.DOTALL)
    assert marks is not None
    assert set(re.findall(r"(\w+):", marks[1])) == set(words._STYLES) == SHOWN


@pytest.mark.parametrize(
    ("path", "description"),
    [
        ("gateway/workers/fleet_view.py", r'state: str\n    """(.*?)"""'),
        ("gateway/telemetry/snapshot.py", r'state: str\n    """(.*?)"""'),
        ("protos/baton/v1/cluster_service.proto", r"((?:  //[^\n]*\n)+)  string state = 3;"),
    ],
)
def test_descriptions_of_a_state_name_all_of_them(path: str, description: str) -> None:
    found = re.search(description, (ROOT / path).read_text(), re.DOTALL)
    assert found is not None
    assert set(re.findall(r"`(\w+)`", found[1])) >= SHOWN
