"""What planning ahead gains: decode steps of the whole engine loop with asynchronous scheduling and without.

    python -m benchmarks.async_scheduling --model DIR [--dtype bfloat16] [--rounds 5] [--json PATH]

    python -m benchmarks.async_scheduling --device-ms 8

With a model, on CPU, the device is the same cores that plan, so there is little to gain. `--device-ms` puts a stand-in
there that computes any step in so many milliseconds and leaves the CPU alone, as a GPU does: what the overlap hides
then is all that happens between two steps. That is commands, scheduler, connector, output messages, status snapshot,
here as in a worker. The two sides alternate, so that a busy machine slows both, and medians are reported; compare
ratios, not runs.
"""

import argparse
import json
import random
import secrets
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from baton.clock import SystemClock
from baton.config import KVTransferConfig, ModelConfig, SchedulerConfig
from baton.kv import KVFingerprint
from baton.messages.request_plane import TO_GATEWAY, Outputs
from baton.request import EngineRequest, RequestOutput
from baton.sampling import SamplingParams
from baton.step import ModelRunnerOutput, SchedulerOutput
from decode_worker import DecodeWorker
from engine.allocator import keep_freed_memory
from engine.grammars.compiler import GrammarCompiler
from engine.kv_cache import KVBlockShape, KVPool
from engine.loading.loader import load_model
from engine.pipeline import Runner, make_pipeline
from engine.runner_parts import make_runner
from kv_transfer.connector.worker import KVConnectorWorker
from scheduler import Scheduler
from worker.core import EngineCore
from worker.kv_connector import KVConnectorScheduler
from worker.kv_events import KVChange
from worker.loop import CommandQueue, EngineLoop

BATCHES = (1, 8, 32)
DEVICE_BATCHES = (32, 256)
CONTEXT = 128
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One batch size: medians over the rounds, in seconds a decode step."""

    batch: int
    async_s: float
    sync_s: float

    @property
    def ratio(self) -> float:
        return self.sync_s / self.async_s


class Stopwatch:
    """A device that takes the same time for every step, and samples token 7."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._num_known: dict[str, int] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in plan.finished_req_ids:
            self._num_known.pop(request_id, None)
        cached = plan.scheduled_cached_reqs
        starts = dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        for new in plan.scheduled_new_reqs:
            self._num_known[new.request_id] = len(new.prompt_token_ids)
            starts[new.request_id] = new.num_computed_tokens
        if plan.num_scheduled_tokens:
            time.sleep(self._step_s)
        sampled = {}
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            if starts[request_id] + num_tokens == self._num_known[request_id]:
                self._num_known[request_id] += 1
                sampled[request_id] = [7]
        return ModelRunnerOutput(sampled)


class Engine:
    """A worker without its sockets to the gateway; outputs are encoded as if they were sent."""

    def __init__(
        self, runner: Runner, pool_shape: KVBlockShape, num_blocks: int, max_model_len: int, *, is_async: bool
    ) -> None:
        """`runner` computes in a pool of `num_blocks` blocks of `pool_shape`; here only its bytes' number matters."""
        clock, commands = SystemClock(), CommandQueue()
        self._times: list[float] = []
        self._done = threading.Event()
        self._num_batch = self._num_missing = 0
        self._connector = KVConnectorWorker(
            KVTransferConfig(),
            "127.0.0.1",
            None,
            secrets.token_hex(8),
            clock,
            np.zeros((num_blocks, pool_shape.size_bytes), np.uint8),
            KVFingerprint(1, "benchmark", "uint8", "", 1, 1, 1, BLOCK_SIZE, 1),
            on_news=commands.wake,
        )
        config = SchedulerConfig(
            max_num_seqs=max(BATCHES + DEVICE_BATCHES),
            max_num_batched_tokens=CONTEXT * max(BATCHES + DEVICE_BATCHES),
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            enable_prefix_caching=False,
            async_scheduling=is_async,
        )
        core = EngineCore(
            Scheduler(config, KVConnectorScheduler(BLOCK_SIZE)),
            make_pipeline(runner, async_scheduling=is_async),
            self._connector,
            GrammarCompiler(Path("unused"), 1_000, (), on_news=lambda: None),
            (),
            clock,
        )
        self._loop = EngineLoop(
            core, DecodeWorker(config.max_num_seqs), self, clock, lease_s=0.0, commands=commands
        )
        self._connector.start()
        self._loop.start()

    def decode_step_s(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds a step, from the first step with everybody in it to the last."""
        self._num_missing = len(prompts) * num_tokens
        self._num_batch, self._times = len(prompts), []
        self._done.clear()
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self._loop.submit(
                "benchmark",
                EngineRequest(
                    request_id=f"{number}-{secrets.token_hex(4)}",
                    prompt_token_ids=tuple(prompt),
                    sampling_params=params,
                ),
            )
        assert self._done.wait(600)
        full = self._times[2:-2]
        return (full[-1] - full[0]) / (len(full) - 1)

    def stop(self) -> None:
        self._loop.stop()
        self._connector.shutdown()

    def send(self, client_id: str, outputs: list[RequestOutput]) -> None:
        assert client_id == "benchmark"
        TO_GATEWAY.encode(Outputs(tuple(outputs)))
        if len(outputs) == self._num_batch:
            self._times.append(time.perf_counter())
        self._num_missing -= sum(len(output.token_ids) for output in outputs)
        if self._num_missing == 0:
            self._done.set()

    def send_kv_change(self, client_ids: tuple[str, ...], change: KVChange) -> None:
        """Nobody has subscribed."""

    def beat(self) -> None:
        """Nobody waits for a heartbeat."""


def main() -> None:
    """Measures, prints a table, and writes JSON if asked to."""
    arguments = _arguments()
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    if arguments.model is not None:
        rows = _measure(lambda is_async: _model_engine(arguments, is_async=is_async), BATCHES, arguments)
    else:
        rows = _measure(
            lambda is_async: _device_engine(arguments, is_async=is_async), DEVICE_BATCHES, arguments
        )
    _report(rows, arguments)


def _measure(
    make: Callable[[bool], Engine], batches: tuple[int, ...], arguments: argparse.Namespace
) -> list[Row]:
    """One round to warm up, then alternating ones."""
    sides = [make(True), make(False)]
    rng = random.Random(0)
    rows = []
    for batch in batches:
        prompts = [[rng.randrange(1_000) for _ in range(CONTEXT)] for _ in range(batch)]
        rounds = [
            [side.decode_step_s(prompts, arguments.tokens) for side in sides]
            for _ in range(arguments.rounds + 1)
        ][1:]
        rows.append(Row(batch, *(statistics.median(side) for side in zip(*rounds, strict=True))))
    for side in sides:
        side.stop()
    return rows


def _num_blocks(batches: tuple[int, ...], num_tokens: int) -> int:
    return 2 + max(batches) * -(-(CONTEXT + num_tokens + 1) // BLOCK_SIZE)


def _model_engine(arguments: argparse.Namespace, *, is_async: bool) -> Engine:
    model = load_model(ModelConfig(dtype=arguments.dtype), arguments.model, torch.device("cpu"))
    num_blocks = _num_blocks(BATCHES, arguments.tokens)
    shape = model.kv_block_shape(BLOCK_SIZE)
    runner = make_runner(model, KVPool(num_blocks, shape, model.device))
    return Engine(runner, shape, num_blocks, model.max_model_len, is_async=is_async)


def _device_engine(arguments: argparse.Namespace, *, is_async: bool) -> Engine:
    num_blocks = _num_blocks(DEVICE_BATCHES, arguments.tokens)
    shape = KVBlockShape(1, 1, BLOCK_SIZE, 1, torch.uint8)
    return Engine(Stopwatch(arguments.device_ms / 1e3), shape, num_blocks, 4096, is_async=is_async)


def _report(rows: list[Row], arguments: argparse.Namespace) -> None:
    device = (
        f"{arguments.model.name}, {arguments.dtype}, {arguments.threads} threads, context {CONTEXT}"
        if arguments.model is not None
        else f"a device that takes {arguments.device_ms:g} ms a step and no CPU"
    )
    print(device)
    print(f"{'decode step':16}{'asynchronous':>16}{'synchronous':>16}{'gain':>8}")
    for row in rows:
        print(
            f"batch {row.batch:<10}{1e3 * row.async_s:>13.2f} ms{1e3 * row.sync_s:>13.2f} ms{row.ratio:>7.3f}x"
        )
    if arguments.json is not None:
        result = {
            "device": device,
            "rounds": arguments.rounds,
            "torch": torch.__version__,
            "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = parser.add_mutually_exclusive_group(required=True)
    device.add_argument("--model", type=Path, help="a Hugging Face folder, computed on CPU")
    device.add_argument("--device-ms", type=float, help="a stand-in that takes so long for a step")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each request in a round")
    parser.add_argument("--json", type=Path, help="write the result here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
