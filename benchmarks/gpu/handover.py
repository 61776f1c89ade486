"""Prefill and decode as two worker processes on one device: their tokens, and what a client waits for."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from baton.config import BatonConfig
from baton.kv import TransferRole
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting
from cluster.serve.child_processes import child_processes
from gateway import GatewayClient
from gateway.client import GenerationEnd
from tests.factories.models import make_model_dir

PART = "handover"
ROOT = Path(__file__).parents[2]
MIB = 2**20
Mode = Literal["disaggregated", "local"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The workload."""

    model: dict[str, Any]
    transports: tuple[str, ...]
    lengths: tuple[int, ...]
    num_tokens: int
    rounds: int
    block_size: int
    num_blocks: int


FULL = Sizes(
    # A block of 64 tokens has 512 KiB. So a prompt of 4,096 tokens has 32 MiB of KV.
    {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    },
    ("cuda_ipc", "zmq_tcp"),
    (1, 64, 65, 500, 1024, 4096),
    24,
    3,
    64,
    1024,
)
TINY = Sizes({}, ("zmq_tcp",), (1, 33), 4, 1, 16, 64)


def run(setting: Setting, emit: Emit) -> None:
    sizes = TINY if setting.is_dry else FULL
    path = make_model_dir(setting.folder / "handover", "llama", **sizes.model)
    for transport in sizes.transports:
        emit(asyncio.run(_measure(_config(setting, sizes, transport), path, sizes)))
    for row in _copies(setting):
        emit(row)
    emit(_killed(setting))


def _config(setting: Setting, sizes: Sizes, transport: str) -> BatonConfig:
    return BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32"},
            "engine": {"device": setting.device.type},
            "scheduler": {"block_size": sizes.block_size, "num_blocks": sizes.num_blocks},
            "gateway": {"grpc_port": 0, "http_port": None},
            "network": {"peer_timeout_s": 60.0},
            "kv_transfer": {"peer_timeout_s": 60.0, "transport": transport},
        }
    )


async def _measure(config: BatonConfig, path: Path, sizes: Sizes) -> Row:
    """Runs every prompt disaggregated and local, in turn, with greedy and seeded sampling."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in sizes.lengths]
    wrong, exposed_ms, gap_ms, transports = [], [], [], set()
    async with child_processes(config, path) as cluster, GatewayClient(cluster.target) as client:
        for number in range(sizes.rounds):
            for prompt in prompts:
                sampling = {"max_tokens": sizes.num_tokens, "ignore_eos": True} | (
                    {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0.0}
                )
                given, _ = await _ask(client, prompt, "local", f"local {number}", sampling)
                taken, end = await _ask(client, prompt, "disaggregated", f"disaggregated {number}", sampling)
                if given != taken:
                    wrong.append(len(prompt))
                transports.add(str(end.timing["transport"]))
                sends = [t for t in end.timing["transfers"] if t["role"] == TransferRole.PRODUCER.value]
                exposed_ms += [1e3 * send["exposed_s"] for send in sends]
                gap_ms.append(1e3 * (end.timing["itl_s"][0] - median(end.timing["itl_s"][1:])))
    asked = config.kv_transfer.transport
    num_asked = sizes.rounds * len(prompts)
    return Row(
        PART,
        f"P and D on one device, {asked}",
        f"{num_asked - len(wrong)} of {num_asked} answers equal",
        f"exposed {median(exposed_ms):.2f} ms, first gap over a step {median(gap_ms):.2f} ms, medians"
        + (f"; went over {sorted(transports)}" if transports != {asked} else "")
        + (f"; differing prompts of {wrong} tokens" if wrong else ""),
        is_failed=bool(wrong) or transports != {asked},
        figures={"equal": num_asked - len(wrong), "exposed_ms": exposed_ms, "first_gap_over_step_ms": gap_ms},
    )


async def _ask(
    client: GatewayClient, prompt: Sequence[int], mode: Mode, salt: str, sampling: dict[str, Any]
) -> tuple[list[int], GenerationEnd]:
    tokens: list[int] = []
    async for event in client.generate(token_ids=prompt, sampling=sampling, mode=mode, cache_salt=salt):
        tokens += event.token_ids
        if event.completion is not None:
            return tokens, event.completion
    raise AssertionError("the stream ended without a completion")


def _copies(setting: Setting) -> Iterator[Row]:
    """Hand-overs between two processes compared with a plain copy on the device; runs another benchmark."""
    code, text, figures = _benchmark(setting, "cuda_ipc")
    if code != 0:
        yield Row(PART, "blocks over cuda_ipc", "failed", text, is_failed=True)
        return
    for result in figures["results"]:
        yield Row(
            PART,
            f"{result['transfer_bytes'] / MIB:g} MiB in blocks of {result['block_bytes'] / MIB:g}",
            f"{result['gb_per_s']:.1f} GB/s, {result['share']:.0%} of a plain copy",
            f"{result['us']:,.0f} us; the copy {result['copy_us']:,.0f} us",
            figures=result,
        )


def _killed(setting: Setting) -> Row:
    """Whether the memory of a killed producer comes back; runs another benchmark."""
    code, text, figures = _benchmark(setting, "cuda_ipc_killed")
    back_after_s = figures.get("back_after_s")
    value = "not back" if back_after_s is None else f"back after {back_after_s:.2f} s"
    return Row(PART, "memory of a killed producer", value, text, is_failed=code != 0, figures=figures)


def _benchmark(setting: Setting, name: str) -> tuple[int, str, dict[str, Any]]:
    """Runs a benchmark, and returns its exit code, the end of its output, and its figures."""
    path = setting.folder / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path)]
    command += ["--dry-run"] if setting.is_dry else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    text = " ".join((done.stdout + done.stderr).strip().splitlines()[-2:])
    return done.returncode, text[-300:], json.loads(path.read_text()) if path.exists() else {}
