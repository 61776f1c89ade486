"""Required calls of a real small model: each must parse and fit its tool's schema, streamed as not streamed.

    python -m tests.e2e.tool_calls [--schemas 50] [--seeds 4] [--max-tokens 2000]

Serves SmolLM2 with a prefill and a decode worker, and asks over HTTP with the `openai` package: fifty schemas, four
seeds each, once whole and once streamed. Calls that `max_tokens` cuts off are counted separately. The command fails if
a whole call does not match its schema, or if the joined pieces of a stream differ from the whole answer.
"""

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
from openai import AsyncOpenAI

from baton.config import BatonConfig
from cluster.serve.child_processes import child_processes
from engine.loading.pretrained import default_cache_dir, resolve
from engine.native.library import native_library
from tests.factories.tool_schemas import Schema, tool_schemas

NUM_AT_ONCE = 8
DTYPE = "float32" if native_library() is None else "auto"
"""Our own kernels give the same bits in every step. Those of torch nearly do, and rounding to 16 bits would
show the difference."""
CONFIG: dict[str, dict[str, Any]] = {
    "model": {"dtype": DTYPE, "quantization": "none"},
    "engine": {"num_threads": 1, "kv_cache_memory_mib": 256},
    "gateway": {"grpc_port": 0, "http_port": 0, "routing_mode": "disaggregated"},
    "network": {"peer_timeout_s": 60.0},
    "kv_transfer": {"peer_timeout_s": 60.0, "lease_s": 60.0},
}
"""Both workers share a machine with much else to do."""

Answer = tuple[list[tuple[str, str]], str | None, str]
"""Calls by name and arguments, text, and why it ended."""


async def check_calls(
    folder: Path, schemas: Sequence[Schema], num_seeds: int, max_tokens: int
) -> Counter[str]:
    """Counts the `valid` calls, and the answers that were `cut off`. Raises AssertionError for anything else."""
    counts: Counter[str] = Counter()
    room = asyncio.Semaphore(NUM_AT_ONCE)
    async with (
        child_processes(BatonConfig.from_mapping(CONFIG), folder) as running,
        AsyncOpenAI(
            base_url=f"http://127.0.0.1:{running.gateway.http_port}/v1", api_key="none", timeout=600.0
        ) as client,
    ):
        model = (await client.models.list()).data[0].id

        async def check(number: int, schema: Schema, seed: int) -> None:
            async with room:
                asked = _asked(model, number, schema, seed, max_tokens)
                whole = await _whole(client, asked)
                streamed = await _streamed(client, asked)
            assert streamed == whole, f"schema {number}, seed {seed}: streamed {streamed}, whole {whole}"
            calls, text, reason = whole
            assert not text, f"schema {number}, seed {seed}: text {text!r} beside a required call"
            if reason == "length":
                counts["cut off"] += 1
                print(f"schema {number}, seed {seed} was cut off: ...{calls[-1][1][-60:]!r}", flush=True)
                calls = calls[:-1]
            else:
                assert calls, f"schema {number}, seed {seed}: no call"
                assert reason == "tool_calls", reason
                counts["answers"] += 1
            for name, arguments in calls:
                assert name == _name(number), name
                jsonschema.validate(json.loads(arguments), schema)
                counts["valid calls"] += 1

        async with asyncio.TaskGroup() as group:
            for number, schema in enumerate(schemas):
                for seed in range(num_seeds):
                    group.create_task(check(number, schema, seed))
    return counts


def _name(number: int) -> str:
    return f"act_{number}"


def _asked(model: str, number: int, schema: Schema, seed: int, max_tokens: int) -> dict[str, Any]:
    function = {"name": _name(number), "description": "Does it.", "parameters": schema}
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"Please do number {number} for the small house in Paris."}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": seed,
        "temperature": 1.0,
        "max_tokens": max_tokens,
    }


async def _whole(client: AsyncOpenAI, asked: dict[str, Any]) -> Answer:
    choice = (await client.chat.completions.create(**asked)).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return calls, choice.message.content or None, choice.finish_reason


async def _streamed(client: AsyncOpenAI, asked: dict[str, Any]) -> Answer:
    names: list[str] = []
    arguments: list[str] = []
    text, reason = "", ""
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                if call.index == len(names):
                    names.append(call.function.name)
                    arguments.append("")
                arguments[call.index] += call.function.arguments or ""
    return list(zip(names, arguments, strict=True)), text or None, reason


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemas", type=int, default=50, help="how many of the fifty")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=2_000)
    given = parser.parse_args(arguments)
    folder = resolve("smollm2", default_cache_dir(os.environ))
    counts = asyncio.run(check_calls(folder, tool_schemas()[: given.schemas], given.seeds, given.max_tokens))
    print(
        f"{counts['valid calls']} calls valid in {counts['answers']} answers, streamed and not; "
        f"{counts['cut off']} more answers cut off by max_tokens"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
