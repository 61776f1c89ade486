"""Hostile grammars beside streams, in short: what `make hostile` does for minutes."""

import json
from pathlib import Path

import pytest

from tests.hostile.__main__ import main

pytestmark = pytest.mark.slow


def test_hostile_grammars_end_no_worker_and_change_no_stream(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert main(["--scenes", "grammars", "--streams", "2", "--calls", "2", "--json", str(report)]) == 0
    (finding,) = json.loads(report.read_text())
    assert finding["seen"]["workers lost"] == 0
