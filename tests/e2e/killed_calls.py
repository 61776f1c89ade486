"""Calls of a real model whose decode worker is killed while they are streamed: not a byte of them may change.

    python -m tests.e2e.killed_calls [--kills 10]

Serves SmolLM2 with one prefill and two decode workers as processes. Each call is streamed twice over HTTP with the
`openai` package: undisturbed, and with a kill -9 of the worker that decodes it, in the middle of its arguments. Greedy
calls and seeded ones take turns. The command fails if the two calls differ, or if no worker ran the request when it
should be killed.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from engine.loading.pretrained import default_cache_dir, resolve
from gateway import GatewayClient
from tests.e2e.tool_calls import CONFIG
from tests.factories.serving import serving_with_forks

NUM_PIECES_BEFORE = 12
"""Of the arguments, before the kill."""
NUM_LOOKS = 20
READY_TIMEOUT_S = 120.0
TEXT = {"type": "string", "minLength": 60, "maxLength": 90}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Writes it down.",
        "parameters": {
            "type": "object",
            "properties": {"title": TEXT, "text": TEXT, "kind": {"enum": ["a", "b", "ç"]}},
            "required": ["title", "text", "kind"],
        },
    },
}


def check_kills(folder: Path, num_kills: int) -> None:
    """Raises AssertionError if a call differs from the undisturbed one, or if no worker ran it at the moment of the
    kill."""
    config = {
        **CONFIG,
        "model": {**CONFIG["model"], "path": str(folder)},
        "cluster": {"prefill": 1, "decode": 2, "ray_address": "none"},
        "network": {**CONFIG["network"], "heartbeat_interval_s": 0.05},
    }
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "baton.yaml"
        path.write_text(json.dumps(config))
        with serving_with_forks(str(path)) as serve:
            ready = serve.wait_ready()
            asyncio.run(_check_kills(ready["target"], f"http://{ready['http']}", num_kills))


async def _check_kills(target: str, http: str, num_kills: int) -> None:
    async with (
        AsyncOpenAI(base_url=f"{http}/v1", api_key="none", timeout=600.0) as openai,
        GatewayClient(target) as gateway,
    ):
        model = (await openai.models.list()).data[0].id
        for number in range(num_kills):
            asked = _asked(model, number)
            undisturbed = await _streamed(openai, asked, lambda: None)
            await _all_ready(gateway)
            killing: list[asyncio.Task[int]] = []

            def kill(killing: list[asyncio.Task[int]] = killing) -> None:
                killing.append(asyncio.create_task(_kill_decoder(gateway)))

            disturbed = await _streamed(openai, asked, kill)
            assert killing, f"call {number} ended before its worker could be killed: {disturbed}"
            assert await killing[0] > 0, f"call {number} had ended when its worker was to be killed"
            assert disturbed == undisturbed, f"call {number}: {disturbed} beside {undisturbed}"
            json.loads(disturbed[0])
            print(f"call {number}: the same {len(disturbed[0])} characters after a kill", flush=True)


def _asked(model: str, number: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"Write note {number} about the sea."}],
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": float(number % 2),
        "seed": number,
        "max_tokens": 300,
        "stream": True,
    }


async def _streamed(
    client: AsyncOpenAI, asked: dict[str, Any], on_middle: Callable[[], None]
) -> tuple[str, str]:
    """A call's arguments, and why the answer ended."""
    pieces: list[str] = []
    reason = ""
    async for chunk in await client.chat.completions.create(**asked):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                pieces.append(call.function.arguments or "")
                if len(pieces) == NUM_PIECES_BEFORE:
                    on_middle()
    return "".join(pieces), reason


async def _kill_decoder(gateway: GatewayClient) -> int:
    """Kills the decode worker that has requests, and returns how many it had. Heartbeats show requests with a
    delay."""
    for _ in range(NUM_LOOKS):
        for worker in (await gateway.describe())["workers"]:
            if worker["role"] == "decode" and (num_requests := sum(worker["requests"].values())):
                os.kill(worker["pid"], signal.SIGKILL)
                return int(num_requests)
        await asyncio.sleep(0.02)
    return 0


async def _all_ready(gateway: GatewayClient) -> None:
    async with asyncio.timeout(READY_TIMEOUT_S):
        while [worker["state"] for worker in (await gateway.describe())["workers"]] != ["ready"] * 3:
            await asyncio.sleep(0.1)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    given = parser.parse_args(arguments)
    check_kills(resolve("smollm2", default_cache_dir(os.environ)), given.kills)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
