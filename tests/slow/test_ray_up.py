"""`ray up` for real, as tests/slow/ray_up.sh does it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("ray_up.sh")
MISSING = 77
"""The script's exit code where something that it needs is not to be had; its last line names it."""


@pytest.mark.slow
@pytest.mark.by_hand
def test_from_nothing_to_an_answered_request_and_ray_down() -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    # The script makes one, of its own cluster.
    environment.pop("BATON_CLUSTER_SECRET", None)
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, timeout=1300, env=environment)
    if done.returncode == MISSING:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout
