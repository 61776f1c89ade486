"""A decode group grows under load and shrinks after it, on real nodes that Ray's autoscaler adds and removes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
ISOLATED = Path(__file__).with_name("isolated.sh")
MISSING = 77
"""Its exit code where namespaces are not to be had."""


@pytest.mark.slow
@pytest.mark.by_hand
@pytest.mark.parametrize("what", ["groups", "fleet"])
def test_nodes_come_and_go_with_the_workers_that_need_them(what: str) -> None:
    command = [str(ISOLATED), sys.executable, "-m", "tests.slow.ray_autoscaler", what]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=ROOT, env=environment)
    if done.returncode == MISSING:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout
