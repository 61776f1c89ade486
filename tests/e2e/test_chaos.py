"""Twelve seconds of chaos, and three faults at least: what `make chaos` does for minutes."""

import json
import subprocess
import sys
from pathlib import Path

from tests.factories.models import make_model_dir

TIMEOUT_S = 600.0


def test_c51_c52_every_stream_ends_as_undisturbed_whatever_is_killed(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    lasting = ["--seconds", "12", "--every", "4", "--faults", "3"]
    command = [
        sys.executable,
        "-m",
        "tests.chaos",
        *lasting,
        "--clients",
        "3",
        "--prefill",
        "1",
        "--max-tokens",
        "60",
    ]
    done = subprocess.run(
        [*command, "--model", str(make_model_dir(tmp_path / "model")), "--json", str(report_file)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads(report_file.read_text())
    assert sum(report["faults"].values()) >= 3, report["faults"]
    assert report["right"] == report["streams"] > 0
