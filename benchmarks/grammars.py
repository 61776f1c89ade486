"""What a structured output adds to the time to first token: an ordinary schema beside free text, in turn.

    python -m benchmarks.grammars [--model DIR] [--rounds 30] [--json FILE]

Real worker processes, the real gateway, one host. Each round asks the same question three times, for one token:

    free     no schema
    new      a schema that no process has seen: it is compiled at the gateway, then at the worker
    known    the same one again

The figures are medians of differences within a round. To compare two versions, run it in a checkout of each by turns.
"""

import argparse
import asyncio
import json
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from baton.config import BatonConfig
from cluster.serve.child_processes import child_processes
from engine.loading.pretrained import default_cache_dir, resolve
from gateway import GatewayClient

NUM_WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Result:
    """Medians, in milliseconds."""

    rounds: int
    free_ms: float
    new_less_free_ms: float
    known_less_free_ms: float


def ordinary_schema(name: str) -> str:
    """A person with an address, as OpenAI's own examples have them; `name` makes it another one."""
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


async def measure(config: BatonConfig, model_path: Path, num_rounds: int) -> Result:
    """Alternates the three kinds."""
    rng = random.Random(0)
    rows: list[tuple[float, float, float]] = []
    async with child_processes(config, model_path) as cluster, GatewayClient(cluster.target) as client:
        for number in range(NUM_WARM_UPS + num_rounds):
            question = f"Describe person number {rng.randrange(1_000, 20_000)} as JSON, with everything that you know."
            schema = ordinary_schema(f"note_{number}")
            row = [await first_token_ms(client, question, {})]
            row += [await first_token_ms(client, question, {"json_schema": schema}) for _ in range(2)]
            if number >= NUM_WARM_UPS:
                rows.append((row[0], row[1], row[2]))
    return Result(
        rounds=num_rounds,
        free_ms=median(free for free, _, _ in rows),
        new_less_free_ms=median(new - free for free, new, _ in rows),
        known_less_free_ms=median(known - free for free, _, known in rows),
    )


async def first_token_ms(client: GatewayClient, question: str, sampling: dict[str, Any]) -> float:
    """From the request to its first token, at the client."""
    began = time.perf_counter()
    options = {"temperature": 0.0, "max_tokens": 1, **sampling}
    async for _ in client.generate(messages=[("user", question)], sampling=options, cache_salt=str(began)):
        return (time.perf_counter() - began) * 1e3
    raise AssertionError("no token came")


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
        options.json.write_text(json.dumps(asdict(result), indent=1) + "\n")


if __name__ == "__main__":
    main()
