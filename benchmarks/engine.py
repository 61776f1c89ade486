"""Decode and prefill speed of the engine on CPU, with transformers' `generate` beside it in the same run.

    python -m benchmarks.engine --model DIR [--dtype bfloat16] [--rounds 5] [--json PATH]

The engine's steps are the real ones: scheduler, runner, sampler. Rounds alternate between the two, so that a busy
machine slows both, and medians are reported; compare ratios, not numbers of different runs.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from baton.config import ModelConfig, SchedulerConfig
from baton.sampling import SamplingParams
from engine.allocator import keep_freed_memory
from engine.kv_cache import KVPool
from engine.loading.loader import LoadedModel, load_model
from engine.runner_parts import make_runner
from scheduler import Request, Scheduler

DECODE_BATCHES = (1, 8, 32)
PREFILL_LENGTHS = (512, 2048)
CONTEXT = 256
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One workload: medians over the rounds, in seconds, and tokens a second."""

    workload: str
    tokens: int
    baton_s: float
    transformers_s: float

    @property
    def ratio(self) -> float:
        return self.transformers_s / self.baton_s


class BatonSide:
    """The engine without its threads and sockets."""

    def __init__(self, model: LoadedModel) -> None:
        shape = model.kv_block_shape(BLOCK_SIZE)
        num_blocks = (
            2 + max(DECODE_BATCHES) * (2 * CONTEXT // BLOCK_SIZE) + max(PREFILL_LENGTHS) // BLOCK_SIZE
        )
        config = SchedulerConfig(
            max_num_batched_tokens=max(*PREFILL_LENGTHS, CONTEXT * max(DECODE_BATCHES)),
            max_model_len=model.max_model_len,
            num_blocks=num_blocks,
            enable_prefix_caching=False,
            block_size=BLOCK_SIZE,
        )
        self._scheduler = Scheduler(config)
        self._runner = make_runner(model, KVPool(num_blocks, shape, model.device))

    def prefill_s(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        return sum(self._steps([prompt], 1))

    def decode_s(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds for one decode step of all prompts, averaged over `num_tokens`."""
        return statistics.mean(self._steps(prompts, num_tokens + 1)[1:])

    def _steps(self, prompts: list[list[int]], max_tokens: int) -> list[float]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self._scheduler.add_request(Request(str(number), prompt, params))
        seconds = []
        while self._scheduler.has_requests():
            start = time.perf_counter()
            plan = self._scheduler.schedule()
            self._scheduler.update_from_output(plan, self._runner.execute(plan))
            seconds.append(time.perf_counter() - start)
        self._runner.execute(self._scheduler.schedule())  # the runner forgets them
        return seconds[:max_tokens]


class TransformersSide:
    """`generate`, greedy, with its default KV cache and attention."""

    def __init__(self, path: Path, dtype: str) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        self._model: Any = model

    def prefill_s(self, prompt: list[int]) -> float:
        return self._generate_s([prompt], 1)

    def decode_s(self, prompts: list[list[int]], num_tokens: int) -> float:
        """The difference of a long and a short generation, so that prefill and set-up cancel out."""
        return (self._generate_s(prompts, num_tokens + 1) - self._generate_s(prompts, 1)) / num_tokens

    def _generate_s(self, prompts: list[list[int]], num_tokens: int) -> float:
        input_ids = torch.tensor(prompts)
        start = time.perf_counter()
        self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
        )
        return time.perf_counter() - start


def main() -> None:
    """Measures, prints a table, and writes JSON if asked to."""
    arguments = _arguments()
    keep_freed_memory()  # as a worker does; transformers gains from it too
    torch.set_num_threads(arguments.threads)
    model = load_model(ModelConfig(dtype=arguments.dtype), arguments.model, torch.device("cpu"))
    baton, reference = BatonSide(model), TransformersSide(arguments.model, arguments.dtype)
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(model.vocab_size) for _ in range(length)] for _ in range(count)]

    rows = []
    for length in PREFILL_LENGTHS:
        prompt = prompts(1, length)[0]
        rows.append(
            _measure(
                f"prefill {length}",
                length,
                arguments.rounds,
                partial(baton.prefill_s, prompt),
                partial(reference.prefill_s, prompt),
            )
        )
    for batch in DECODE_BATCHES:
        group = prompts(batch, CONTEXT)
        rows.append(
            _measure(
                f"decode, batch {batch}",
                batch,
                arguments.rounds,
                partial(baton.decode_s, group, arguments.decode_tokens),
                partial(reference.decode_s, group, arguments.decode_tokens),
            )
        )
    _report(rows, arguments)


def _measure(
    workload: str, tokens: int, rounds: int, ours: Callable[[], float], theirs: Callable[[], float]
) -> Row:
    """One round to warm up, then alternating ones."""
    pairs = [(ours(), theirs()) for _ in range(rounds + 1)][1:]
    baton_s, transformers_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Row(workload, tokens, baton_s, transformers_s)


def _report(rows: list[Row], arguments: argparse.Namespace) -> None:
    print(
        f"{arguments.model.name}, {arguments.dtype}, {arguments.threads} threads; decode context {CONTEXT}\n"
        f"{'':20}{'baton':>10}{'':>12}{'transformers':>14}{'':>12}{'ratio':>8}"
    )
    for row in rows:
        ours, theirs = row.tokens / row.baton_s, row.tokens / row.transformers_s
        print(
            f"{row.workload:20}{ours:>10.0f}/s{1e3 * row.baton_s:>7.1f} ms"
            f"{theirs:>13.0f}/s{1e3 * row.transformers_s:>7.1f} ms{row.ratio:>7.2f}x"
        )
    if arguments.json is not None:
        result = {
            "model": arguments.model.name,
            "dtype": arguments.dtype,
            "threads": arguments.threads,
            "context": CONTEXT,
            "rounds": arguments.rounds,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode-tokens", type=int, default=24, help="steps a round")
    parser.add_argument(
        "--json", type=Path, help="write the result here, e.g. benchmarks/results/engine.json"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
