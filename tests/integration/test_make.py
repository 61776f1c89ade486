"""How make calls pip on machines that are not like ours."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_pip_installs_into_the_environment_although_the_user_prefers_his_own_folder() -> None:
    """Such a preference is in pip.conf (`user = true`) or in PIP_USER. pip then refuses every virtual environment."""
    install = f"{sys.executable} -m pip install --quiet --no-index --dry-run pip"
    done = subprocess.run(
        ["make", "--eval", f"install: ; @{install}", "install"],
        cwd=ROOT,
        env={**os.environ, "PIP_USER": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
