"""How fast one request decodes with and without drafts, on this machine's CPU. The answers must be equal.

    python -m benchmarks.speculation [--model smollm2] [--dtype float32] [--quantization none] [--threads N]
        [--rounds 5] [--num-tokens 200] [--num-drafts 4] [--cpu-time] [--json PATH]
        [--draft-layers K ...] [--draft-model PATH] [--draft-quantization int4]

There are three kinds of workloads. In one, the model repeats a text with a few changes, and prompt lookup
guesses well. In free texts, prompt lookup must not cost much. The last is an object of a JSON schema with
long names, with and without forced tokens. If draft models are given, each of them guesses instead of prompt
lookup, and no token is forced. Sides alternate after each answer, and the fastest answer of each side counts,
since other work on the machine can only slow an answer. With `--cpu-time` and one thread, only this process'
CPU time counts. Compare ratios, not figures of different runs.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from baton.clock import SystemClock
from baton.config import BatonConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from baton.request import EngineRequest
from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from benchmarks.gpu.loop import InstantLoads
from benchmarks.json_file import save_json
from engine.allocator import keep_freed_memory
from engine.draft_parts import load_draft, make_drafter
from engine.grammars.compiler import GrammarCompiler
from engine.kv_cache import KVPool
from engine.loading.loader import LoadedModel, load_model
from engine.loading.pretrained import default_cache_dir, resolve
from engine.pipeline import make_pipeline
from engine.runner_parts import make_runner
from scheduler import Scheduler
from worker.core import EngineCore
from worker.kv_connector_scheduler import KVConnectorScheduler

CONFIG = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=128, max_model_len=2048, num_blocks=400)
SOURCE = Path(__file__).parents[1] / "engine" / "request_table.py"
EDITED = f"Repeat this code, with RequestTable renamed to Table:\n```python\n{SOURCE.read_text()[:1500]}\n```"
NAMES = (
    "customer_identification_number",
    "shipping_address_postal_code",
    "number_of_items_in_order",
    "preferred_day_of_delivery",
    "total_amount_in_cents",
)
ORDER = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9999} for name in NAMES},
    "required": list(NAMES),
    "additionalProperties": False,
}
_ids = count()


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    prompt: str
    temperature: float
    schema: StructuredOutput | None = None

    def params(self, num_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=5,
            max_tokens=num_tokens,
            structured_output=self.schema,
            ignore_eos=self.schema is None,
        )


WORKLOADS = (
    Workload("edit a text, greedy", EDITED, 0.0),
    Workload("edit a text, sampled", EDITED, 0.7),
    Workload("free text, greedy", "Write a story about a lighthouse keeper and his dog.", 0.0),
    Workload("free text, sampled", "Explain how rain forms, and why some clouds bring none.", 1.0),
    Workload(
        "JSON with forced names",
        "Invent an order, as JSON.",
        0.0,
        StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(ORDER)),
    ),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """The fastest answer of each side, in tokens per second after the first token."""

    side: str
    workload: str
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    ratio: float
    num_drafts: int
    num_accepted: int
    num_forced: int


class Side:
    """A worker's engine without its planes: with drafts, with forced tokens, or with neither."""

    def __init__(
        self,
        name: str,
        model_config: ModelConfig,
        model: LoadedModel,
        folder: Path,
        clock: Callable[[], float],
        speculation: Mapping[str, object],
    ) -> None:
        """`speculation` is the configuration's section of this name."""
        self.name = name
        self._clock = clock
        asked = SpeculationConfig.model_validate({"forced_tokens": False, **speculation})
        grammars = GrammarCompiler(folder, model.vocab_size, model.eos_token_ids, lambda: None, SystemClock())
        draft = load_draft(BatonConfig(model=model_config, speculation=asked), folder, model)
        num_blocks = (CONFIG.num_blocks or 0) + (0 if draft is None else draft.num_spare_blocks(CONFIG))
        pool = KVPool(num_blocks, model.kv_block_shape(CONFIG.block_size), model.device)
        drafter = make_drafter(asked, CONFIG, model, pool, draft)
        self.core = EngineCore(
            Scheduler(
                CONFIG, KVConnectorScheduler(CONFIG.block_size), num_speculative_tokens=asked.num_drafts
            ),
            make_pipeline(
                make_runner(model, pool, None, grammars, drafter, takes_forced=bool(asked.forced_tokens)),
                async_scheduling=CONFIG.async_scheduling,
            ),
            InstantLoads(),
            grammars,
            model.eos_token_ids,
            SystemClock(),
        )

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> tuple[float, list[int]]:
        """Runs one request, and returns the tokens per second after the first token, and the tokens."""
        request = EngineRequest(
            request_id=str(next(_ids)), prompt_token_ids=tuple(prompt), sampling_params=params
        )
        self.core.add_request(request, "benchmark")
        tokens: list[int] = []
        began, num_at_first, has_ended = 0.0, 0, False
        while not has_ended:
            for output in self.core.step().get("benchmark", ()):
                tokens += output.token_ids
                has_ended = output.finish_reason is not None
            if tokens and not began:
                began, num_at_first = self._clock(), len(tokens)
        speed = (len(tokens) - num_at_first) / (self._clock() - began)
        while self.core.may_progress:  # no step planned ahead may compute beside the other side
            self.core.step()
        return speed, tokens

    def counts(self) -> tuple[int, ...]:
        """Numbers of drafts, accepted drafts, and forced tokens."""
        counters = self.core.counters()
        names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "forced_tokens")
        return tuple(counters.get(name, 0) for name in names)


def measure(
    plain: Side, drafted: Side, workload: Workload, prompt: Sequence[int], num_tokens: int, rounds: int
) -> Cell:
    """Runs one round to warm up, then alternating rounds."""
    params = workload.params(num_tokens)
    speeds: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        before = drafted.counts()
        (plain_speed, expected), (speed, tokens) = (side.answer(prompt, params) for side in (plain, drafted))
        assert tokens == expected, f"{workload.name}: drafts changed a token"
        speeds.append((plain_speed, speed))
    fastest, drafted_fastest = (max(column) for column in zip(*speeds[1:], strict=True))
    counts = (b - a for a, b in zip(before, drafted.counts(), strict=True))
    return Cell(drafted.name, workload.name, fastest, drafted_fastest, drafted_fastest / fastest, *counts)


def main() -> None:
    """Measures, prints a table, and writes JSON if requested."""
    arguments = _arguments()
    keep_freed_memory()  # as a worker does
    torch.set_num_threads(arguments.threads)
    folder = resolve(arguments.model, default_cache_dir(os.environ))
    config = {"dtype": arguments.dtype, "quantization": arguments.quantization}
    model_config = ModelConfig.model_validate(config)
    model = load_model(model_config, folder, torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    given = (model_config, model, folder, clock)
    plain = Side("plain", *given, {})
    sides = [Side(name, *given, keys) for name, keys in _asked_sides(arguments).items()]
    cells = []
    for workload in WORKLOADS:
        messages = [{"role": "user", "content": workload.prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text)["input_ids"]
        has_grammar = workload.schema is not None
        others = [side for side in sides if side.name != ("ngram" if has_grammar else "forced")]
        cells += [
            measure(plain, side, workload, prompt, arguments.num_tokens, arguments.rounds) for side in others
        ]
    for side in (plain, *sides):
        side.core.close()
    table = Table(title=f"tokens/s of one request; {arguments.threads} threads, {config}")
    for title in ("workload", "side", "without", "with", "ratio", "drafts", "right", "forced"):
        table.add_column(title, justify="right")
    for cell in cells:
        speeds = (cell.plain_tokens_per_s, cell.drafted_tokens_per_s)
        counts = (str(cell.num_drafts), str(cell.num_accepted), str(cell.num_forced))
        row = (cell.workload, cell.side, *(f"{each:.1f}" for each in speeds), f"{cell.ratio:.2f}", *counts)
        table.add_row(*row)
    Console(width=120).print(table)
    if arguments.json is not None:
        result = {key: value for key, value in vars(arguments).items() if key != "json"}
        result["cells"] = [asdict(cell) for cell in cells]
        save_json(arguments.json, result)


def _asked_sides(arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    """The `speculation` section of each side, by the side's name."""
    most = {"num_speculative_tokens": arguments.num_drafts}
    drafting = {"method": "draft_model", **most}
    sides = {f"{count} layers": {**drafting, "draft_layers": count} for count in arguments.draft_layers}
    if arguments.draft_model is not None:
        other = {"draft_model": arguments.draft_model, "draft_quantization": arguments.draft_quantization}
        sides[f"{arguments.draft_model} {arguments.draft_quantization or ''}".strip()] = {**drafting, **other}
    return sides or {"ngram": {"method": "ngram", **most}, "forced": {"forced_tokens": True}}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2", help="model folder, GGUF file or name (default: smollm2)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--quantization", choices=("none", "int8", "int4", "auto"), default="none")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-tokens", type=int, default=200, help="the most of an answer")
    parser.add_argument("--cpu-time", action="store_true", help="measure this process' CPU time")
    parser.add_argument("--num-drafts", type=int, default=4, help="the most of a step")
    parser.add_argument(
        "--draft-layers", type=int, nargs="+", default=(), metavar="K", help="the model's first layers guess"
    )
    parser.add_argument("--draft-model", metavar="PATH", help="this model guesses")
    parser.add_argument(
        "--draft-quantization", choices=("none", "int8", "int4"), help="how --draft-model keeps its matrices"
    )
    parser.add_argument("--json", type=Path, help="write the result here, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
