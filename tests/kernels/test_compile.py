"""Every kernel compiles, without a GPU, for all supported GPUs, with the intended units and without spills.

Kernels are compiled in separate processes: this process interprets kernels, so it cannot compile them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.cases import joined

TIMEOUT_S = 1800.0
"""Limit for a process, which takes minutes."""

MAX_KEPT_BYTES = 2**29
"""Limit for the kept kernels; all launches take a tenth of it."""

Compiled = list[dict[str, Any]]

OTHERS = {"usual": (80,), "all": (80, 100)}
"""Architectures for which one launch of each kernel is compiled."""
DIFFER = ("paged_attention", "rms_norm", "rope_store", "skinny_linear")
"""The kernels whose first launch is compiled for other architectures even with `usual`: what older GPUs lack
makes the most difference to them."""


@pytest.fixture(scope="module", params=["usual", pytest.param("all", marks=pytest.mark.by_hand)])
def which(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def compiled(which: str, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The compiled launches: the usual ones or all for sm_90, and one launch of some or all kernels for others.

    `make test-all` compiles all.

    What an earlier run compiled is read again, unless its source, its options or the compiler have changed.
    """
    folder = tmp_path_factory.mktemp("compiled")
    environment = _without_interpreter()
    environment["TRITON_CACHE_DIR"] = str(_kept_among_runs(pytestconfig))
    options = ["--first-for", *map(str, OTHERS[which])]
    if which == "usual":
        options += ["--first-of", *DIFFER, "--usual"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_only", *options, "--json", folder / "compiled"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    results: Compiled = json.loads((folder / "compiled").read_text())
    return results


def _kept_among_runs(config: pytest.Config) -> Path:
    assert config.cache is not None
    cache = config.cache.mkdir("triton")
    if sum(file.stat().st_size for file in cache.rglob("*")) > MAX_KEPT_BYTES:
        shutil.rmtree(cache)
    return cache


def _without_interpreter() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def of_arch(compiled: Compiled, arch: int, name: str = "") -> Compiled:
    found = [kernel for kernel in compiled if kernel["arch"] == arch and kernel["launch"].startswith(name)]
    assert found, f"nothing of {name} was compiled for sm_{arch}"
    return found


def test_every_file_of_kernels_is_compiled_for_all(compiled: Compiled, which: str) -> None:
    """A launch is named after its test file, which is named after the kernel."""
    named = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    for arch in (90, *OTHERS[which]):
        assert {kernel["launch"].partition(":")[0] for kernel in of_arch(compiled, arch)} <= named
    without_float8 = {kernel["launch"].partition(":")[0] for kernel in of_arch(compiled, 80)}
    assert without_float8 >= {*DIFFER, *["sample"] * (which == "all")}


def test_no_register_is_spilled_on_hopper(compiled: Compiled) -> None:
    spilled = [kernel for kernel in of_arch(compiled, 90) if kernel["stack_bytes"]]
    others = [kernel for kernel in spilled if not kernel["launch"].startswith("latent_attention")]
    tiles = [kernel for kernel in others if re.match("expert_linear: .* down, .*[0-9]{4}", kernel["launch"])]
    assert others == tiles
    assert all(kernel["stack_bytes"] <= 40 and not kernel["spills_in_loop"] for kernel in tiles), tiles


def test_tiles_of_latents_spill_outside_their_loop(compiled: Compiled) -> None:
    """Half of all registers are sums. Converted and gathered tiles take a few more than there are (docs/kernels.md)."""
    kernels = of_arch(compiled, 90, "latent_attention")
    for kernel in kernels:
        is_plain = not any(part in kernel["launch"] for part in ("float8", "blocks of"))
        assert kernel["spills_in_loop"] <= (2 if is_plain else 50), kernel
    assert any(kernel["has_wgmma"] and kernel["has_tma"] for kernel in kernels)


def test_hopper_runs_prefill_on_its_own_matrix_units_and_copy_engine(compiled: Compiled) -> None:
    kernels = [
        kernel for kernel in of_arch(compiled, 90, "paged_attention") if "attention" in kernel["kernel"]
    ]
    prefill = [kernel for kernel in kernels if "prefill" in kernel["launch"]]
    assert prefill
    assert all(kernel["has_wgmma"] for kernel in prefill if "float32" not in kernel["launch"])
    assert all(kernel["has_mma"] for kernel in kernels if "float32" not in kernel["launch"])
    assert any(kernel["has_tma"] for kernel in prefill)
    assert any(kernel["has_tma"] for kernel in kernels if "decode" in kernel["launch"])


def test_no_program_wants_more_shared_memory_than_there_is(compiled: Compiled) -> None:
    most = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
    for kernel in compiled:
        assert kernel["shared_bytes"] <= most[kernel["arch"]], kernel


def test_kernels_of_a_decode_step_wait_for_the_one_before_them(compiled: Compiled) -> None:
    """Every program waits before it stores anything, and before it loads what another kernel may write."""
    may_load = {
        "_skinny_linear_fma_kernel",
        "_rms_norm_kernel",
        "_rope_store_kernel",
        "_paged_attention_kernel",
        "_latent_attention_kernel",
        "_latent_store_kernel",
    }
    may_not = {
        "_skinny_linear_dot_kernel",
        "_gate_mul_kernel",
        "_merge_partials_kernel",
        "_route_rows_kernel",
        "_sort_pairs_kernel",
        "_expert_linear_kernel",
        "_sum_pairs_kernel",
    }
    waiting = [kernel for kernel in of_arch(compiled, 90) if kernel["before_wait"] is not None]
    assert {kernel["kernel"] for kernel in waiting} == may_load | may_not
    assert len(waiting) == sum(kernel["kernel"] in may_load | may_not for kernel in of_arch(compiled, 90))
    for kernel in waiting:
        assert set(kernel["before_wait"]) <= {"LDG"}, kernel
        assert not kernel["before_wait"] or kernel["kernel"] in may_load, kernel
    name = "skinny_linear: Llama-3.1-8B o, 1"  # the names of other launches begin with it
    (one_row,) = [kernel for kernel in of_arch(compiled, 90, name) if kernel["launch"] == name]
    assert one_row["before_wait"] == ["LDG"] * 4, "a tile of weights, 64 bytes a thread; x comes later"
    assert all(kernel["before_wait"] is None for kernel in of_arch(compiled, 80)), "there is no such launch"


SERVED = (("--no-graphs",), ("--fp8",), ("--no-graphs", "--one-at-once", "--requests", "50"))
"""Requests one at a time take longest. Fifty requests have every length and every kind of sampling."""
SERVED_BY_HAND = tuple(
    ("--no-graphs", f"--architecture={name}") for name in ("mixtral", "gpt_oss", "deepseek_v3", "qwen2")
)


@pytest.mark.parametrize("cases", [SERVED, pytest.param(SERVED_BY_HAND, marks=pytest.mark.by_hand)], ids=str)
def test_nothing_is_left_to_compile_when_requests_come(cases: tuple[tuple[str, ...], ...]) -> None:
    command = [sys.executable, "-m", "tests.kernels.serving", *joined(cases)]
    output = subprocess.run(
        command, env=_without_interpreter(), stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True
    ).stdout
    for options, line in zip(cases, output.splitlines()[-len(cases) :], strict=True):
        kernels = json.loads(line)
        assert kernels["rehearsed"] > 20, options
        assert kernels["late"] == [], options
