"""Hostile grammars beside streams, in short: what `make hostile` does for minutes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TIMEOUT_S = 400.0


def test_hostile_grammars_end_no_worker_and_change_no_stream(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "tests.hostile",
        "--scenes",
        "grammars",
        "--streams",
        "2",
        "--calls",
        "2",
    ]
    done = subprocess.run(
        [*command, "--json", str(report)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (finding,) = json.loads(report.read_text())
    assert finding["seen"]["workers lost"] == 0
