"""scripts/find_python.sh: the Python of the environment, and the error if none can be used; install.sh keeps it."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts processes

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"

IS_FREE_THREADED = "import sysconfig; sysconfig.get_config_var = lambda _name: 1"
IS_PYPY = "import sys; sys.implementation.name = 'pypy'"
HAS_NO_VENV = "import sys; sys.modules['ensurepip'] = None"


def make_python(path: Path, version: str, change: str = "pass") -> None:
    """An interpreter that says it has this version. `change`: what else differs from this one."""
    major, minor = version.split(".")
    lines = [
        f"#!{sys.executable}",
        "import sys",
        f"sys.version_info, sys.version = ({major}, {minor}, 0), '{version}.0 (main)'",
        change,
        f"if sys.argv[1:] == ['--version']: print('Python {version}.0'); sys.exit()",
        "program = sys.argv[2]",
        "del sys.argv[1:3]",
        "exec(program)",
    ]
    path.write_text("\n".join(lines))
    path.chmod(0o755)


def run(script: Sequence[str | Path], **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(["/bin/bash", *script], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.rstrip(), done.stderr


def find(folder: Path, **environment: str) -> tuple[int, str, str]:
    """Runs the script with only this folder on the path."""
    return run([SCRIPTS / "find_python.sh"], PATH=str(folder), **environment)


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (["3.11", "3.12", "3.13", "3.14"], "python3.11"),
        (["3.12", "3.13", "3.15"], "python3.12"),
        (["3.14", "3.10"], "python3.14"),
    ],
)
def test_the_best_tested_python_is_chosen(tmp_path: Path, there: list[str], chosen: str) -> None:
    for version in there:
        make_python(tmp_path / f"python{version}", version)
    assert find(tmp_path) == (0, str(tmp_path / chosen), "")


@pytest.mark.parametrize(
    ("version", "change", "reason"),
    [
        ("3.15", "pass", "is version 3.15.0"),
        ("3.10", "pass", "is version 3.10.0"),
        ("3.13", IS_FREE_THREADED, "is version 3.13.0, free-threaded"),
        ("3.11", IS_PYPY, "is pypy"),
        ("3.12", HAS_NO_VENV, "is version 3.12.0 without the module ensurepip"),
        ("3.12", "syntax error", "does not run, or is older than 3.6"),
    ],
)
def test_an_unsuitable_python_is_refused_with_its_reason(
    tmp_path: Path, version: str, change: str, reason: str
) -> None:
    """Otherwise pip would end minutes later, and say that there is no version of some package."""
    make_python(tmp_path / "python3", version, change)
    code, chosen, error = find(tmp_path)
    assert (code, chosen) == (1, "")
    assert "Baton needs CPython 3.11, 3.12, 3.13 or 3.14 " in error
    assert f"\n    {tmp_path}/python3 {reason}\n" in error


def test_only_the_python_that_is_asked_for_is_tried(tmp_path: Path) -> None:
    mine = tmp_path / "my pythons"
    mine.mkdir()
    make_python(tmp_path / "python3.13", "3.13")
    make_python(mine / "python", "3.11")
    assert find(tmp_path, PYTHON=str(mine / "python")) == (0, str(mine / "python"), "")
    make_python(mine / "python", "3.9")
    code, _, error = find(tmp_path, PYTHON=str(mine / "python"))
    assert (code, f"\n    {mine}/python is version 3.9.0\n" in error) == (1, True)
    code, _, error = find(tmp_path, PYTHON="python3.12")
    assert (code, "\n    no python3.12 at all\n" in error) == (1, True)


def test_every_page_names_the_same_versions() -> None:
    (line,) = re.findall(r"^versions=\((.*?)\)", (SCRIPTS / "find_python.sh").read_text(), re.MULTILINE)
    versions = sorted(line.split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert versions == ["3.11", "3.12", "3.13", "3.14"]
    assert project["requires-python"] == ">=3.11,<3.15"
    assert "Python 3.11, 3.12 or 3.13" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("asked", "message"),
    [("3.12", "has Python 3.11.0, but PYTHON="), (None, "/bin/python is version 3.15.0\n")],
)
def test_an_environment_keeps_its_python(tmp_path: Path, asked: str | None, message: str) -> None:
    """If another Python is chosen, it is refused before anything is installed."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    make_python(venv / "bin" / "python", "3.11" if asked else "3.15")
    make_python(tmp_path / "python3.12", "3.12")
    variables = {"PYTHON": str(tmp_path / f"python{asked}")} if asked else {}
    code, said, error = run([SCRIPTS / "install.sh", venv], PATH=f"{tmp_path}:/usr/bin:/bin", **variables)
    assert (code, said) == (1, "")
    assert message in error
