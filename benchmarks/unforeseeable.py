"""What becomes of planning ahead beside requests with drafts, on a device that takes 8 ms a step and no CPU.

    python -m benchmarks.unforeseeable [--seconds 3] [--rounds 3]

Some requests get four drafts in each step, half of them right; the others get none. Three ways to plan, in turn:

    wait       no step is planned while one with drafts is under way, as EngineCore does
    leave out  the next step is planned at once, without the requests whose drafts are under way
    in turn    no step is planned ahead at all (scheduler.async_scheduling off)
"""

import argparse
import statistics
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import PropertyMock, patch

from baton.clock import SystemClock
from baton.config import SchedulerConfig
from baton.request import EngineRequest
from baton.sampling import SamplingParams
from baton.step import ModelRunnerOutput, SchedulerOutput
from benchmarks.gpu.loop import InstantLoads
from engine.grammars.compiler import GrammarCompiler
from engine.pipeline import InlinePipeline, Pipeline, ThreadedPipeline
from scheduler import Scheduler
from worker.core import EngineCore
from worker.kv_connector import KVConnectorScheduler

STEP_S = 0.008
NUM_DRAFTS = 4
WAYS = ("wait", "leave out", "in turn")
MIXES = ((31, 1), (16, 16), (0, 32), (255, 1), (128, 128))
"""Requests without and with drafts."""


class Device:
    """Sleeps, and says the same token."""

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        end = time.perf_counter() + STEP_S
        cached = plan.scheduled_cached_reqs
        starts = dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        for new in plan.scheduled_new_reqs:
            self._num_tokens[new.request_id] = len(new.prompt_token_ids)
            starts[new.request_id] = new.num_computed_tokens
        sampled: dict[str, list[int]] = {}
        for name, num_tokens in plan.num_scheduled_tokens.items():
            num_drafts = len(plan.scheduled_spec_decode_tokens.get(name, ()))
            if starts[name] + num_tokens - num_drafts == self._num_tokens[name]:
                sampled[name] = [17] * (1 + num_drafts // 2)
                self._num_tokens[name] += len(sampled[name])
        drafts = {name: (17,) * NUM_DRAFTS for name in sampled if name.startswith("drafted")}
        time.sleep(max(0.0, end - time.perf_counter()))
        return ModelRunnerOutput(sampled, draft_token_ids=drafts)


class AsyncDevice(ThreadedPipeline):
    """One step is under way while the next is planned, whatever it holds."""

    def num_ahead(self, plan: SchedulerOutput) -> int:
        return int(bool(plan.num_scheduled_tokens))


def tokens_per_s(way: str, num_plain: int, num_drafted: int, seconds: float) -> tuple[float, float]:
    """Of one request without drafts, and of one with them; 0 if there is none."""
    is_async = way != "in turn"
    config = SchedulerConfig(
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        max_model_len=8192,
        num_blocks=60_000,
        async_scheduling=is_async,
    )
    pipeline: Pipeline = AsyncDevice(Device()) if is_async else InlinePipeline(Device())
    core = EngineCore(
        Scheduler(config, KVConnectorScheduler(16), num_speculative_tokens=NUM_DRAFTS),
        pipeline,
        InstantLoads(),
        GrammarCompiler(Path("none"), 1_000, (2,), lambda: None, SystemClock()),
        (2,),
        SystemClock(),
    )
    names = [*(f"plain {i}" for i in range(num_plain)), *(f"drafted {i}" for i in range(num_drafted))]
    params = SamplingParams(max_tokens=8_000, ignore_eos=True)
    for number, name in enumerate(names):
        request = EngineRequest(request_id=name, prompt_token_ids=(number,) * 16, sampling_params=params)
        core.add_request(request, "benchmark")
    counts: Counter[str] = Counter()
    for _ in range(20):
        core.step()
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
        for output in core.step().get("benchmark", ()):
            counts[output.request_id.partition(" ")[0]] += len(output.token_ids)
    elapsed_s = time.perf_counter() - began
    core.close()
    return (
        counts["plain"] / elapsed_s / max(1, num_plain),
        counts["drafted"] / elapsed_s / max(1, num_drafted),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{'plain + drafted':>16}" + "".join(f"{way:>20}" for way in WAYS) + "   tokens/s of a request")
    for mix in MIXES:
        speeds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(arguments.rounds):
            for way in WAYS:
                patched: AbstractContextManager[object] = nullcontext()
                if way == "leave out":
                    patched = patch.object(Scheduler, "awaits_output", PropertyMock(return_value=False))
                with patched:
                    speeds[way].append(tokens_per_s(way, *mix, arguments.seconds))
        cells = [
            " / ".join(f"{statistics.median(column):.1f}" for column in zip(*speeds[way], strict=True))
            for way in WAYS
        ]
        print(f"{mix[0]:>9} + {mix[1]:>4}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
