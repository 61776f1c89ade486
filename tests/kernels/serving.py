"""Serves requests of every kind as on a GPU, and prints which kernels would have been compiled while they waited.

    python -m tests.kernels.serving [--architecture NAME] [--no-graphs] [--fp8] [--one-at-once]
                                     [--requests 150] [--next ...]

Nothing is compiled, and nothing runs: each kernel that Triton lacks is noted, and replaced by a stand-in. Tokens are
arbitrary memory. Prints a JSON object for each case: how many kernels the rehearsal and the recording needed, and the
names of those that only the check of attention or serving needed. Do not run it with TRITON_INTERPRET set.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from baton.clock import SystemClock
from baton.config import SchedulerConfig
from baton.kv_groups import KVGroups
from baton.request import EngineRequest
from baton.sampling import SamplingParams
from engine.batch import StepLimits
from engine.gpu.attention_check import attention_cases
from engine.gpu.graphs import Repeater
from engine.pipeline import StreamPipeline
from engine.runner import ModelRunner
from scheduler import Scheduler
from tests.factories.engine import FakeBlockMover, make_grammars
from tests.factories.families import DEEPSEEK_V3
from tests.factories.models import WINDOWED
from tests.kernels.cases import split
from tests.kernels.compile_only import compiling_for
from tests.kernels.device_parts import make_parts
from worker.core import EngineCore
from worker.kv_connector_scheduler import KVConnectorScheduler

CPU = torch.device("cpu")
CONFIG = SchedulerConfig(
    max_model_len=1024,
    max_num_seqs=32,
    max_num_batched_tokens=128,
    num_blocks=80,
    block_size=32,
    preemption="swap",
    num_swap_blocks=64,
)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.0, "logit_bias": {3: 1.0}},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.5, "seed": 1, "logprobs": 3},
    {"temperature": 0.5, "seed": 1, "frequency_penalty": 0.4},
)

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
}
"""Of a config.json."""
SPECIAL = {"qwen2": WINDOWED, "deepseek_v3": DEEPSEEK_V3}
"""A `qwen2` has windows, in several KV groups."""


@contextmanager
def noting_what_is_wanted(device: int = 90) -> Iterator[list[str]]:
    """Within the context, the list receives the name of every kernel that would be compiled for sm_90.

    A kernel that was compiled or noted before for the same `device` is not.
    """
    wanted: list[str] = []
    do_compile = JITFunction._do_compile

    def note(self: Any, key: Any, signature: Any, device: Any, *_: Any) -> object:
        wanted.append(self.__name__)
        kernel = self.device_caches[device][0][key] = object()
        return kernel

    JITFunction._do_compile = note
    try:
        with compiling_for(90, device):
            yield wanted
    finally:
        JITFunction._do_compile = do_compile


def serve(runner: ModelRunner, config: SchedulerConfig, kv_groups: KVGroups, num_requests: int) -> None:
    """Serves requests of all lengths, one by one and many at once. Some need more blocks than there are."""
    core = EngineCore(
        Scheduler(config, KVConnectorScheduler(config.block_size, kv_groups), kv_groups=kv_groups),
        StreamPipeline(runner),
        FakeBlockMover(),
        make_grammars(),
        (),
        SystemClock(),
    )
    rng = random.Random(0)
    requests = iter(range(num_requests))
    while (left := [*zip(range(rng.choice((1, 2, 5, 17, 40))), requests, strict=False)]) != []:
        for _, number in left:
            prompt = tuple(rng.randrange(300) for _ in range(rng.choice((1, 2, 3, 17, 60, 150, 900))))
            params = SamplingParams(max_tokens=rng.choice((2, 9, 40)), **rng.choice(PARAMS))
            if number % 8 == 0:
                params = replace(params, prompt_logprobs=2)
            core.add_request(
                EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params), "test"
            )
        core.may_progress = True
        while core.may_progress:
            core.step()
    assert config.max_num_seqs == 1 or core.counters()["preemptions"] > 0, "nothing was swapped"
    core.close()


def play(arguments: Sequence[str], device: int) -> dict[str, Any]:
    """One case. Each has a `device` of its own, for which no kernel is known."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.serving")
    parser.add_argument("--architecture", default="llama")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--one-at-once", action="store_true")
    parser.add_argument("--requests", type=int, default=150)
    options = parser.parse_args(arguments)
    config = CONFIG.model_copy(update={"max_num_seqs": 1}) if options.one_at_once else CONFIG
    with tempfile.TemporaryDirectory() as folder, noting_what_is_wanted(device) as wanted:
        assert CONFIG.num_blocks is not None
        assert CONFIG.max_model_len is not None
        model, parts, pool = make_parts(
            Path(folder),
            CPU,
            StepLimits(config.max_num_seqs, CONFIG.max_num_batched_tokens, CONFIG.max_model_len),
            dtype="bfloat16",
            quantization="fp8" if options.fp8 else "auto",
            num_blocks=CONFIG.num_blocks,
            block_size=CONFIG.block_size,
            num_multiprocessors=132,
            architecture=options.architecture,
            **(SHAPE | SPECIAL.get(options.architecture, {})),
        )
        parts.rehearse()
        num_rehearsed = len(wanted)
        for case in attention_cases(model, parts, pool):
            case.run()
        by_check = wanted[num_rehearsed:]
        if not options.no_graphs:
            parts.record(Repeater())
        runner = parts.runner(pool, CONFIG.num_swap_blocks or 0)
        num_rehearsed = len(wanted)
        serve(runner, config, parts.forward.groups, options.requests)
    return {"rehearsed": num_rehearsed, "late": [*by_check, *wanted[num_rehearsed:]]}


def main() -> int:
    for device, options in enumerate(split(sys.argv[1:])):
        print(*options, file=sys.stderr)  # which case it was, if one fails
        print(json.dumps(play(options, device)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
