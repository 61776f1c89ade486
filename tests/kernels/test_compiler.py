"""A worker logs which ptxas makes its kernels, and does not start with a missing one."""

import os
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas

from baton.errors import ConfigError
from engine.gpu.compiler import PTXAS_VARIABLES, Compiler, find_compiler, naming_assembler

HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)


@pytest.fixture(autouse=True)
def _only_what_a_test_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in PTXAS_VARIABLES:  # set first, so that what find_compiler sets is undone, too
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def make_ptxas(folder: Path, says: str, name: str = "ptxas") -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


def make_release(folder: Path, version: str, name: str = "ptxas") -> str:
    release = ".".join(version.split(".")[:2])
    return make_ptxas(folder, f"Cuda compilation tools, release {release}, V{version}", name)


def test_the_default_is_tritons_own() -> None:
    compiler = find_compiler(HOPPER)
    assert Path(compiler.ptxas).is_relative_to(Path(triton.__file__).parent)
    assert compiler.version.startswith(get_ptxas(90).version + ".")


@pytest.mark.parametrize("capability", [HOPPER, AMPERE, BLACKWELL], ids=str)
def test_the_variable_holds_for_every_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """This Triton may read either of the two variables."""
    path = make_release(tmp_path, "13.5.37")
    monkeypatch.setenv("TRITON_PTXAS_PATH", path)
    compiler = find_compiler(capability)
    assert (compiler.ptxas, compiler.version) == (path, "13.5.37")
    assert get_ptxas(10 * capability[0]).path == path


def test_one_of_its_own_for_blackwell_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", make_release(tmp_path, "13.5.37"))
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", own := make_release(tmp_path, "13.6.1", "own"))
    assert find_compiler(BLACKWELL).ptxas == own


@pytest.mark.parametrize("variable", PTXAS_VARIABLES)
@pytest.mark.parametrize("what", ["not there", "a folder", "not executable", "fails", "another program"])
def test_one_that_is_no_ptxas_is_an_error_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, variable: str
) -> None:
    path = {
        "not there": str(tmp_path / "nowhere"),
        "a folder": str(tmp_path),
        "not executable": str(tmp_path / "plain"),
        "fails": make_ptxas(tmp_path, "'; exit 3; '", "fails"),
        "another program": sys.executable,
    }[what]
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    monkeypatch.setenv(variable, path)
    with pytest.raises(ConfigError, match=f"{variable}: got '{path}'"):
        find_compiler(HOPPER)


@pytest.mark.parametrize(
    ("version", "capability", "is_suspect"),
    [
        ("12.8.93", HOPPER, True),
        ("13.2.99", HOPPER, True),
        ("13.3.0", HOPPER, False),
        ("13.10.1", HOPPER, False),
        ("14.0.1", HOPPER, False),
        ("12.8.93", AMPERE, False),
        ("12.9.86", BLACKWELL, False),
    ],
    ids=str,
)
def test_wgmma_wants_a_newer_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    capability: tuple[int, int],
    is_suspect: bool,
) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", make_release(tmp_path, version))
    assert find_compiler(capability).is_suspect is is_suspect


def test_kernels_are_kept_where_the_variable_says(tmp_path: Path) -> None:
    assert find_compiler(HOPPER).cache_dir == str(tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_a_folder_that_takes_no_kernels_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"cannot be kept in .*file/cache.*TRITON_CACHE_DIR"):
        find_compiler(HOPPER)


@pytest.mark.parametrize("kind", ["CUDA error", "Triton Error [CUDA]"])
def test_a_fault_of_a_kernel_names_the_assembler_and_a_remedy(kind: str) -> None:
    compiler, cpu = Compiler("/bundled/ptxas", "12.8.93", "/cache", is_suspect=True), torch.device("cpu")
    fault = f"{kind}: an illegal memory access was encountered"
    with pytest.raises(ConfigError) as refused, naming_assembler(compiler, cpu):
        raise RuntimeError(f"{fault}\nFor debugging consider")
    assert str(refused.value).startswith(f"a Triton kernel failed on this GPU: {fault}. ")
    for word in ("12.8.93", "/bundled/ptxas", "TRITON_PTXAS_PATH", "docs/gpu.md"):
        assert word in str(refused.value)
    assert "debugging" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["CUDA out of memory. Tried to allocate 2.00 GiB", "Triton Error [CUDA]: out of memory"]
)
def test_other_errors_of_a_start_stay_as_they_are(text: str) -> None:
    compiler, cpu = Compiler("/bundled/ptxas", "12.8.93", "/cache", is_suspect=True), torch.device("cpu")
    with pytest.raises(RuntimeError, match="out of memory") as raised, naming_assembler(compiler, cpu):
        raise RuntimeError(text)
    assert not isinstance(raised.value, ConfigError)
