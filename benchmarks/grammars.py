"""What a structured output and tools add to the time to first token. Requests with them alternate with free text.

    python -m benchmarks.grammars [--model DIR] [--rounds 30] [--json FILE]

Real worker processes and the real gateway run on one host. Each round asks the same question three times, for
one token:

    free     no schema
    new      a schema that no process has seen: it is compiled at the gateway, then at the worker
    known    the same schema again

Then each round sends a conversation whose prompt describes a tool with a schema of 4 KB, for one token, in
turn:

    plain      the description is text of the system message; the request has no tools
    auto       the request has the tool, so the answer is free text, and may contain a call
    required   the answer is a call of the tool

All three prompts have the same tokens except for a number at their end. The common part is cached, as in an
agent's turns, and the tool has been used before. CPU time is measured for this process, which contains
gateway and client, and for the worker. Figures are medians of differences within a round. The worker's CPU
time is a mean, since it is counted in ticks of 10 ms. To compare two versions of Baton, run this in a
checkout of each, in turn.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil

from baton.config import BatonConfig
from benchmarks.json_file import save_json
from cluster.serve.child_processes import child_processes
from engine.loading.pretrained import default_cache_dir, resolve
from gateway import GatewayClient
from gateway.conversation import ChatMessage, Conversation, Tool, ToolChoice, ToolUse
from gateway.conversation.described_tools import described_turns
from gateway.conversation.template import ChatTemplate

NUM_WARM_UPS = 3
NUM_SCHEMA_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Schemas:
    """Times to first token in milliseconds: the median for free text, and medians of the differences from it."""

    free_ms: float
    new_less_free_ms: float
    known_less_free_ms: float


@dataclass(frozen=True, slots=True)
class ToolUseCost:
    """What a tool adds to one answer of one token, in milliseconds."""

    first_token_ms: float
    here_cpu_ms: float
    """CPU time of the gateway and the client."""
    worker_cpu_ms: float


@dataclass(frozen=True, slots=True)
class Tools:
    prompt_tokens: int
    schema_characters: int
    plain_ms: float
    """Median time to the first token of a `plain` request."""
    auto_less_plain: ToolUseCost
    required_less_plain: ToolUseCost


@dataclass(frozen=True, slots=True)
class Result:
    rounds: int
    schemas: Schemas
    tools: Tools


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request for one token took, in milliseconds."""

    first_token_ms: float
    here_cpu_ms: float
    worker_cpu_ms: float
    prompt_tokens: int


def ordinary_schema(name: str) -> str:
    """A person with an address, as in OpenAI's own examples. Another `name` makes another schema."""
    text = {"type": "string"}
    address = {
        "type": "object",
        "properties": {"street": text, "city": text, "zip": {"type": "string", "maxLength": 10}},
    }
    properties = {
        "name": text,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "role": {"enum": ["admin", "editor", "viewer"]},
        "address": address | {"required": ["street", "city"], "additionalProperties": False},
        "tags": {"type": "array", "items": text, "maxItems": 10},
        name: {"type": ["string", "null"]},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return json.dumps(schema)


def large_tool() -> Tool:
    """A tool whose schema has at least 4 KB."""
    people: dict[str, Any] = {}
    while len(json.dumps(schema := {"type": "object", "properties": people})) < NUM_SCHEMA_CHARACTERS:
        name = f"person_{len(people)}"
        people[name] = json.loads(ordinary_schema(f"note_{name}"))
    return Tool("save_people", "Saves what is known of people.", {**schema, "required": list(people)})


async def measure(config: BatonConfig, model_path: Path, num_rounds: int) -> Result:
    async with child_processes(config, model_path) as cluster, GatewayClient(cluster.target) as client:
        (worker,) = cluster.workers.values()
        schemas = await measure_schemas(client, num_rounds)
        return Result(
            num_rounds, schemas, await measure_tools(client, psutil.Process(worker.pid), num_rounds)
        )


async def measure_schemas(client: GatewayClient, num_rounds: int) -> Schemas:
    """Alternates the three kinds of requests."""
    rng = random.Random(0)
    rows: list[tuple[float, float, float]] = []
    for number in range(NUM_WARM_UPS + num_rounds):
        question = (
            f"Describe person number {rng.randrange(1_000, 20_000)} as JSON, with everything that you know."
        )
        schema = ordinary_schema(f"note_{number}")
        row = [await first_token_ms(client, question, {})]
        row += [await first_token_ms(client, question, {"json_schema": schema}) for _ in range(2)]
        if number >= NUM_WARM_UPS:
            rows.append((row[0], row[1], row[2]))
    return Schemas(
        free_ms=median(free for free, _, _ in rows),
        new_less_free_ms=median(new - free for free, new, _ in rows),
        known_less_free_ms=median(known - free for free, _, known in rows),
    )


async def first_token_ms(client: GatewayClient, question: str, sampling: dict[str, Any]) -> float:
    """The time from the request to its first token, measured at the client."""
    began = time.perf_counter()
    options = {"temperature": 0.0, "max_tokens": 1, **sampling}
    async for _ in client.generate(messages=[("user", question)], sampling=options, cache_salt=str(began)):
        return (time.perf_counter() - began) * 1e3
    raise AssertionError("no token came")


async def measure_tools(client: GatewayClient, worker: psutil.Process, num_rounds: int) -> Tools:
    """Alternates the three kinds of requests. Each kind comes first in equally many rounds."""
    tool, rng, kinds = large_tool(), random.Random(0), ("plain", "auto", "required")
    rows: list[dict[str, Asked]] = []
    for number in range(NUM_WARM_UPS + num_rounds):
        turn = number % len(kinds)
        row = {
            kind: await ask(client, worker, _conversation(kind, tool, rng.randrange(10_000, 100_000)))
            for kind in (*kinds[turn:], *kinds[:turn])
        }
        assert len({asked.prompt_tokens for asked in row.values()}) == 1, f"prompts differ: {row}"
        if number >= NUM_WARM_UPS:
            rows.append(row)
    return Tools(
        prompt_tokens=rows[0]["plain"].prompt_tokens,
        schema_characters=len(json.dumps(tool.parameters)),
        plain_ms=median(row["plain"].first_token_ms for row in rows),
        auto_less_plain=_added(rows, "auto"),
        required_less_plain=_added(rows, "required"),
    )


def _conversation(kind: str, tool: Tool, person: int) -> Conversation:
    """A conversation. For `plain`, the text describes the tool as for a model whose template has no tools."""
    question = ChatMessage("user", f"Save what you know of person number {person}.")
    use = ToolUse.REQUIRED if kind == "required" else ToolUse.AUTO
    conversation = Conversation((question,), (tool,), ToolChoice(use))
    if kind != "plain":
        return conversation
    turns = described_turns(conversation, ChatTemplate(""))
    return Conversation(tuple(ChatMessage(turn["role"], turn["content"]) for turn in turns))


async def ask(client: GatewayClient, worker: psutil.Process, conversation: Conversation) -> Asked:
    began_worker, began_cpu, began, first_token_s = (
        _cpu_s(worker),
        time.process_time(),
        time.perf_counter(),
        0.0,
    )
    options = {"temperature": 0.0, "max_tokens": 1}
    async for event in client.generate(conversation=conversation, sampling=options):
        first_token_s = first_token_s or time.perf_counter() - began
        if event.completion is not None:
            return Asked(
                first_token_s * 1e3,
                (time.process_time() - began_cpu) * 1e3,
                (_cpu_s(worker) - began_worker) * 1e3,
                event.completion.usage["prompt_tokens"],
            )
    raise AssertionError("the answer has no end")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _added(rows: Sequence[dict[str, Asked]], kind: str) -> ToolUseCost:
    pairs = [(row[kind], row["plain"]) for row in rows]
    return ToolUseCost(
        first_token_ms=median(with_tool.first_token_ms - plain.first_token_ms for with_tool, plain in pairs),
        here_cpu_ms=median(with_tool.here_cpu_ms - plain.here_cpu_ms for with_tool, plain in pairs),
        worker_cpu_ms=mean(with_tool.worker_cpu_ms - plain.worker_cpu_ms for with_tool, plain in pairs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grammars", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    options = parser.parse_args()
    config = BatonConfig.model_validate(
        {
            "model": {"path": options.model},
            "engine": {"kv_cache_memory_mib": 256},
            "gateway": {"grpc_port": 0, "http_port": None, "routing_mode": "local"},
            "cluster": {"prefill": 0, "decode": 1},
        }
    )
    model_path = resolve(options.model, default_cache_dir(os.environ))
    result = asyncio.run(measure(config, model_path, options.rounds))
    print(json.dumps(asdict(result), indent=1))
    if options.json is not None:
        save_json(options.json, asdict(result))


if __name__ == "__main__":
    main()
