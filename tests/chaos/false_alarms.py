"""Nothing fails, but the machine is overloaded: no worker may be mistaken for lost.

    python -m tests.chaos.false_alarms [--model FOLDER] [--minutes 30] [--prompt-tokens 4000] [--burners 2]

`baton serve` with two prefill and two decode workers and all limits at their defaults, streams with long prompts, and
processes that keep the cores busy. The exit code is 1 if a worker was lost or replaced, or if an answer differs from
the undisturbed one.
"""

import argparse
import asyncio
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

from gateway.client import GatewayClient
from tests.chaos.clients import Clients
from tests.chaos.fleet import serve_flags
from tests.chaos.questions import Question, answer_all
from tests.chaos.stalls import burners
from tests.factories.serving import ServeProcess, serving

NUM_PREFILL, NUM_DECODE = 2, 2
NUM_CLIENTS, NUM_QUESTIONS = 4, 8
"""A worker has blocks for two of these prompts, so most are computed whole although they come again."""
MAX_TOKENS = 32
ALARM = re.compile(
    r"lost the requests on worker|which had no requests of this gateway, is lost|has made no progress|\bhung\b|\bdied\b"
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.false_alarms")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--prompt-tokens", type=int, default=4_000)
    parser.add_argument("--burners", type=int, default=2, help="processes that keep a core busy each")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    with serving(*serve_flags("local", options.model, NUM_PREFILL, NUM_DECODE)) as serve:
        report = asyncio.run(_run(serve, serve.wait_ready()["target"], options))
        serve.interrupt()
        report["exit_code"] = serve.wait_gone()
    print(json.dumps(report, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    is_well = report["right"] == report["streams"] and not report["alarms"] and not report["replaced"]
    return 0 if is_well and report["exit_code"] == 0 else 1


async def _run(serve: ServeProcess, target: str, options: argparse.Namespace) -> dict[str, Any]:
    async with GatewayClient(target) as client:
        vocab_size = (await client.model_info())["vocab_size"]
        rng = random.Random(1)
        questions = await answer_all(
            client,
            [_question(rng, index, vocab_size, options.prompt_tokens) for index in range(NUM_QUESTIONS)],
        )
        before = await _incarnations(client)
        clients = Clients(target, questions, NUM_CLIENTS, seed=1)
        with burners(options.burners):
            streaming = asyncio.create_task(clients.run())
            await asyncio.sleep(60 * options.minutes)
            clients.stop()
            await streaming
        after = await _incarnations(client)
    tally = clients.tally
    return {
        "minutes": options.minutes,
        "prompt_tokens": options.prompt_tokens,
        "burners": options.burners,
        "streams": tally.num_streams,
        "right": tally.num_right,
        "wrong": tally.wrong,
        "longest_time_to_a_token_s": max(tally.longest_gaps),
        "alarms": [line for line in serve.stderr.splitlines() if ALARM.search(line)],
        "replaced": [name for name in before if after.get(name) != before[name]],
    }


def _question(rng: random.Random, index: int, vocab_size: int, num_tokens: int) -> Question:
    sampling = {"max_tokens": MAX_TOKENS, "temperature": 0.8 * (index % 2), "seed": index, "ignore_eos": True}
    return Question(tuple(rng.randrange(3, vocab_size) for _ in range(num_tokens)), sampling)


async def _incarnations(client: GatewayClient) -> dict[str, str]:
    return {worker["name"]: worker["incarnation"] for worker in (await client.describe())["workers"]}


if __name__ == "__main__":
    sys.exit(main())
