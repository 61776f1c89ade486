"""The Dockerfile: hadolint finds no fault, and the file agrees with the chart and the lock."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.factories.chart import FOLDER, ROOT

HADOLINT = Path(sys.executable).parent / "hadolint"
DOCKERFILE = ROOT / "Dockerfile"


@pytest.mark.skipif(not HADOLINT.exists(), reason=f"there is no {HADOLINT}; `make helm-test` installs it")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([HADOLINT, str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_runs_as_the_user_that_the_chart_asks_for() -> None:
    context = yaml.safe_load((FOLDER / "values.yaml").read_text())["podSecurityContext"]
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}\n" in DOCKERFILE.read_text()


def test_what_is_copied_is_let_through_and_is_there() -> None:
    copied = set(re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE))
    sources = {name for line in copied for name in line.split()}
    admitted = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert sources == admitted
    assert [name for name in sources if not (ROOT / name).exists()] == []


def test_every_package_is_in_the_image() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "tests", "examples"}
    copied = set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE.read_text(), re.MULTILINE))
    assert copied == packages


def test_the_lock_pins_what_the_image_installs() -> None:
    """The script itself lists what it installs. A package that is not pinned could have another version in each
    build."""
    script = (ROOT / "scripts" / "install_image.sh").read_text()
    (program,) = re.findall(r"python -c '\n(.*?)'\n}", script, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    wanted = {re.split(r"[><=;\[ ]", line)[0].lower() for line in done.stdout.splitlines()}
    lock = (ROOT / "requirements" / "cpu.lock").read_text().lower().replace("_", "-")
    pinned = set(re.findall(r"^([a-z0-9._-]+)==", lock, re.MULTILINE))
    assert {"redis", "opentelemetry-sdk"} <= wanted <= pinned


def test_nixl_has_the_version_of_its_extra() -> None:
    script = (ROOT / "scripts" / "install_image.sh").read_text()
    (program,) = re.findall(r"nixl=\$\(sed -n '(.*)' pyproject.toml\)", script)
    done = subprocess.run(["sed", "-n", program, "pyproject.toml"], capture_output=True, text=True, cwd=ROOT)
    pins = (ROOT / "requirements" / "test_all.lock").read_text().splitlines()
    assert f"nixl-cu12=={done.stdout.strip()}" in pins


def test_the_assembler_is_where_triton_looks_for_it() -> None:
    """Only the binary is installed, beside the python of the environment that the image copies."""
    (path,) = re.findall(r"TRITON_PTXAS_PATH=(\S+)", DOCKERFILE.read_text())
    (environment,) = re.findall(r"^RUN python -m venv (\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    script = (ROOT / "scripts" / "install_image.sh").read_text()
    assert 'scripts/install_ptxas.sh python "$(dirname "$(command -v python)")/ptxas"' in script
    assert path == f"{environment}/bin/ptxas"


def test_the_assembler_is_pinned_by_its_hash_and_new_enough() -> None:
    lock = (ROOT / "requirements" / "ptxas.lock").read_text()
    major, minor = map(int, re.findall(r"^nvidia-cuda-nvcc==(\d+)\.(\d+)\.\d+ ", lock, re.MULTILINE)[0])
    assert (major, minor) >= (13, 3), "earlier ones may reuse registers that a WGMMA still reads"
    hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})\b", lock)
    assert len(set(hashes)) == 2, "x86-64 and ARM"
