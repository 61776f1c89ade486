"""A worker compares its attention kernels with torch before it serves, and refuses to serve where they differ."""

import inspect
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.config import SchedulerConfig
from baton.errors import ConfigError
from engine.batch import StepLimits
from engine.build import DeviceEngine
from engine.capacity import Capacity
from engine.gpu.attention_check import NUM_RUNS, attention_cases, check_attention
from engine.gpu.compiler import Compiler
from engine.kernels.paged_attention import paged_attention
from engine.layers import triton_attention
from tests.kernels.device_parts import make_parts

COMPILER = Compiler("/somewhere/ptxas", "12.8.93", "/cache", is_suspect=True)
LIMITS = StepLimits(max_num_seqs=8, max_num_batched_tokens=48, max_model_len=600)
WORKER: dict[str, Any] = {"num_hidden_layers": 2, "block_size": 32, "num_blocks": 12}
"""Unless a test says otherwise."""


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "fp8_cache": True},
        {"dtype": "float32", "fp8_cache": True, "block_size": 16},
        {"architecture": "qwen3", "head_dim": 32},
        {"architecture": "mistral", "sliding_window": 70},
        {"architecture": "deepseek_v3", "num_key_value_heads": 2, "kv_lora_rank": 24, "qk_rope_head_dim": 8},
        {"architecture": "gpt_oss", "sliding_window": 70, "num_local_experts": 4, "head_dim": 16},
    ],
    ids=str,
)
def test_kernels_that_are_right_pass(tmp_path: Path, device: torch.device, settings: dict[str, Any]) -> None:
    model, parts, pool = make_parts(tmp_path, device, LIMITS, **(WORKER | settings))
    check_attention(model, parts, pool, COMPILER)
    assert not pool.blocks_NLKHTD.view(torch.uint8).any(), "the pool reads as zeros, as before"


@pytest.mark.parametrize(
    ("limits", "num_blocks"), [(StepLimits(1, 1, 1), 2), (StepLimits(2, 16, 600), 2)], ids=str
)
def test_a_worker_with_little_room_is_checked_too(
    tmp_path: Path, device: torch.device, limits: StepLimits, num_blocks: int
) -> None:
    model, parts, pool = make_parts(tmp_path, device, limits, **(WORKER | {"num_blocks": num_blocks}))
    assert len([case.name for case in attention_cases(model, parts, pool)]) == 2
    check_attention(model, parts, pool, COMPILER)


def wrong_from(launch: int, spoil: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[..., None]:
    """The kernel; from launch number `launch` on, its result is spoiled."""
    launches = 0

    def launch_kernel(*args: Any) -> None:
        nonlocal launches
        paged_attention(*args)
        launches += 1
        if launches >= launch:
            given = inspect.signature(paged_attention).bind(*args).arguments
            spoil(given["partials"].out_PQD, given["out_TQD"])

    return launch_kernel


def swap_two_columns(partial_PQD: torch.Tensor, out_TQD: torch.Tensor) -> None:
    """Like a reused register: right numbers in wrong places, in one head."""
    for rows in (partial_PQD, out_TQD):
        rows[:, 0, :2] = rows[:, 0, :2].flip(-1)


def spoil_with_nan(partial_PQD: torch.Tensor, out_TQD: torch.Tensor) -> None:
    partial_PQD[0, 0, 0] = out_TQD[0, 0, 0] = math.nan


@pytest.mark.parametrize(
    ("first_wrong", "spoil", "says"),
    [
        (1, swap_two_columns, f"attention, prefill: .* in run 1 of {NUM_RUNS}"),
        (3, swap_two_columns, f"attention, prefill: .* in run 3 of {NUM_RUNS}"),
        (NUM_RUNS + 2, swap_two_columns, f"attention, decode: .* in run 2 of {NUM_RUNS}"),
        (1, spoil_with_nan, "differ from torch by nan"),
    ],
    ids=["always", "once in a while", "decode alone", "nan"],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernels_that_are_wrong_are_refused(
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    first_wrong: int,
    spoil: Callable[[torch.Tensor, torch.Tensor], None],
    says: str,
    dtype: str,
) -> None:
    model, parts, pool = make_parts(tmp_path, device, LIMITS, dtype=dtype, **WORKER)
    monkeypatch.setattr(triton_attention, "paged_attention", wrong_from(first_wrong, spoil))
    with pytest.raises(ConfigError, match=says) as refused:
        check_attention(model, parts, pool, COMPILER)
    off, allowed = re.findall(r"by (\S+) in run .* at most (\S+),", str(refused.value))[0]
    assert not float(off) <= float(allowed), "both belong to one number, which is wrong"
    for remedy in ("ptxas 12.8.93", "/somewhere/ptxas", "TRITON_PTXAS_PATH", "13.3", "docs/gpu.md"):
        assert remedy in str(refused.value)
    assert not pool.blocks_NLKHTD.any()


@pytest.mark.parametrize("is_wrong", [pytest.param(False, marks=pytest.mark.by_hand), True])
def test_a_rank_gets_no_runner_of_wrong_kernels(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    """The same calls as in a worker's start, without memory and connector."""
    model, _, pool = make_parts(tmp_path, device, LIMITS, **(WORKER | {"num_hidden_layers": 1}))
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    properties = SimpleNamespace(multi_processor_count=2, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    if is_wrong:
        monkeypatch.setattr(triton_attention, "paged_attention", wrong_from(1, swap_two_columns))
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    unused: Any = None
    rank = DeviceEngine(
        model=model,
        capacity=Capacity(scheduler, StepLimits(2, 16, 64)),
        pool=pool,
        memory=unused,
        connector=unused,
        on_progress=unused,
        uses_graphs=False,
        num_threads=0,
        compiler=COMPILER,
    )
    with pytest.raises(ConfigError, match="attention, prefill") if is_wrong else nullcontext():
        rank._make_gpu_runner(None)
