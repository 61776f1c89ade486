"""How make finds and calls Python and pip on machines that are not like ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("is_suitable", [True, False])
def test_the_given_python_is_used_or_named(is_suitable: bool, tmp_path: Path) -> None:
    (python := tmp_path / "my programs" / "python").parent.mkdir()
    if is_suitable:
        python.symlink_to(sys.executable)
    done = subprocess.run(
        [ROOT / "scripts/find_python.sh"],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if is_suitable:
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{python}\n", "")
    else:
        assert (done.returncode, done.stdout) == (1, "")
        assert f"Found: no {python} at all." in done.stderr
