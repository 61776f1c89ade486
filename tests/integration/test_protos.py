"""Changes of protos/ that would break clients of the last release are found; others pass."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).with_name("buf")

BREAKING = {
    "a field is gone": ("optional string cache_salt = 7;", ""),
    "a field has another number": ("int32 priority = 6;", "int32 priority = 66;"),
    "a field has another type": ("int32 priority = 6;", "string priority = 6;"),
    "a call is gone": ("rpc Abort(AbortRequest) returns (AbortResponse);", ""),
}


def breaking(folder: Path) -> subprocess.CompletedProcess[str]:
    """The breaking changes that the check of `make lint` finds in another folder."""
    command = [str(BUF), "breaking", "--against", "protos/released.binpb"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def edit(folder: Path, old: str, new: str) -> None:
    file = folder / "protos/baton/v1/generation_service.proto"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize("change", BREAKING)
def test_a_change_that_breaks_clients_is_found(copy: Path, change: str) -> None:
    edit(copy, *BREAKING[change])
    found = breaking(copy)
    assert found.returncode != 0
    assert "generation_service.proto" in found.stdout


def test_a_new_field_breaks_nobody(copy: Path) -> None:
    edit(copy, "int32 priority = 6;", "int32 priority = 6;\n  string note = 100;")
    found = breaking(copy)
    assert (found.returncode, found.stdout) == (0, "")


def test_make_lint_asks_it() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "buf breaking --against $(RELEASED_PROTOS)" in makefile
    assert "RELEASED_PROTOS := protos/released.binpb" in makefile
