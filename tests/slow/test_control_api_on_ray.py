"""A node that leaves, a fleet's command and a gateway that are killed, on real Ray nodes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
@pytest.mark.by_hand
def test_clients_notice_neither_a_node_that_leaves_nor_a_fleets_command_that_is_killed() -> None:
    command = [sys.executable, "-m", "tests.slow.control_api_on_ray"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all well\n")
