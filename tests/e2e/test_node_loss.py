"""Five nodes, two prefill and three decode workers; a node is killed under load, and no stream notices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.factories.models import make_model_dir

TIMEOUT_S = 300.0

pytestmark = pytest.mark.by_hand  # test_chaos.py also kills nodes


def test_c52_a_lost_node_costs_no_request_and_the_fleet_heals(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "tests.chaos.node_loss",
        "--model",
        str(make_model_dir(tmp_path / "model")),
    ]
    done = subprocess.run(
        [*command, "--json", str(report_file)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads(report_file.read_text())
    assert sorted(len(workers) for workers in report["placed_on"]) == [0, 1, 1, 1, 1, 1], (
        "one worker a node, head none"
    )
    assert report["serving_without"] == 4, "the lost worker has no room until another node joins"
    assert report["incarnations_kept"] == 4
    assert report["moved"] > 0, "the lost worker had requests"
    assert report["right"] == report["streams"]
