"""Rehearses an outline of a model, then the model, and prints which kernels only the model needed.

    python -m tests.kernels.ahead [--architecture NAME] [--fp8] [--fp8-cache] [--num-ranks N] [--compile]
                                   [--expert-parallel] [--next ...]

With --compile the outline's kernels are compiled for sm_90 as in a worker, on two threads; otherwise they are only
noted. Prints a JSON object for each case: how many kernels the outline needed, the hashes of those that would be
loaded, and the names of those that the model, the recording of its graphs or the check of attention needed in addition.
Do not run it with TRITON_INTERPRET set.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from baton.config import ModelConfig
from engine.batch import StepLimits
from engine.collectives import SilentRank
from engine.gpu.attention_check import attention_cases
from engine.gpu.compile_ahead import CompileAhead, rehearse_outline
from engine.gpu.device_parts import make_device_parts
from engine.gpu.graphs import Repeater
from engine.kv_cache import KVPool
from engine.layers.triton_backend import TritonBackend
from engine.loading.loader import LoadedModel, load_model, outline_model
from tests.factories.families import DEEPSEEK_V3
from tests.factories.models import WINDOWED, make_model_dir
from tests.kernels.cases import split
from tests.kernels.compile_only import compiling_for
from tests.kernels.serving import noting_what_is_wanted

CPU = torch.device("cpu")
LIMITS = StepLimits(max_num_seqs=20, max_num_batched_tokens=640, max_model_len=1024)
BLOCK_SIZE = 32
NUM_MULTIPROCESSORS = 132


def rehearse(model: LoadedModel) -> None:
    """Everything that a worker does with the model before it serves, without the comparison."""
    pool = KVPool(40, model.kv_block_shape(BLOCK_SIZE), CPU)
    parts = make_device_parts(model, pool, LIMITS, NUM_MULTIPROCESSORS)
    parts.rehearse()
    for case in attention_cases(model, parts, pool):
        case.run()
    parts.record(Repeater())


def play(arguments: Sequence[str], device: int) -> dict[str, Any]:
    """One case. Each has a `device` of its own, for which no kernel is known."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.ahead")
    parser.add_argument("--architecture", default="llama")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--fp8-cache", action="store_true")
    parser.add_argument("--num-ranks", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    shape: dict[str, Any] = {"head_dim": 32}
    if options.architecture == "qwen2":
        shape |= WINDOWED | {"sliding_window": 100}
    elif options.architecture == "deepseek_v3":
        shape = DEEPSEEK_V3
    with tempfile.TemporaryDirectory() as folder:
        path = make_model_dir(Path(folder) / "model", options.architecture, **shape)
        config = ModelConfig.model_validate(
            {"dtype": "bfloat16", "quantization": "fp8" if options.fp8 else "auto"}
        )
        kv_cache_dtype: Literal["auto", "fp8"] = "fp8" if options.fp8_cache else "auto"
        ranks = SilentRank(0, options.num_ranks)
        outline = outline_model(
            config,
            path,
            TritonBackend(),
            kv_cache_dtype=kv_cache_dtype,
            collectives=ranks,
            expert_parallel=options.expert_parallel,
        )
        model = load_model(
            config,
            path,
            CPU,
            TritonBackend(),
            kv_cache_dtype=kv_cache_dtype,
            collectives=ranks,
            expert_parallel=options.expert_parallel,
        )
    ahead = partial(rehearse_outline, outline, BLOCK_SIZE, LIMITS, NUM_MULTIPROCESSORS, uses_graphs=True)
    loaded: list[str] = []
    if options.compile:
        with (
            compiling_for(90, device),
            CompileAhead(ahead, lambda kernel: loaded.append(kernel.hash), num_threads=2),
        ):
            pass
    with noting_what_is_wanted(device) as wanted:
        if not options.compile:
            ahead()
        num_ahead = len(wanted)
        rehearse(model)
    return {"ahead": num_ahead, "loaded": loaded, "late": wanted[num_ahead:]}


def main() -> int:
    for device, options in enumerate(split(sys.argv[1:])):
        print(*options, file=sys.stderr)  # which case it was, if one fails
        print(json.dumps(play(options, device)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
