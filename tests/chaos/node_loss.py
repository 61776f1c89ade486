"""A node is lost: two prefill and three decode workers on five nodes, one of which is killed while clients stream.

    python -m tests.chaos.node_loss [--model FOLDER] [--json FILE]

Every stream continues on the remaining workers, and must end as without the loss. Once another node has joined, the
fleet is complete again.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from gateway.client import GatewayClient
from tests.chaos.clients import Clients
from tests.chaos.fleet import actors_left, serve_flags, until_healed
from tests.chaos.machines import Machines, prepare
from tests.chaos.main_thread import MainThread, run_beside
from tests.chaos.questions import answer_all, make_questions
from tests.factories.serving import serving

NUM_PREFILL, NUM_DECODE = 2, 3
NUM_CLIENTS = 8
NUM_QUESTIONS = 8
MAX_TOKENS = 60
BEFORE_S, AFTER_S = 2.0, 8.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.node_loss")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    prepare(os.environ)
    machines = Machines(NUM_PREFILL + NUM_DECODE, cpus_per_node=1)
    try:
        with serving(*serve_flags(machines.address, options.model, NUM_PREFILL, NUM_DECODE)) as serve:
            report = run_beside(partial(_run, machines, serve.wait_ready()["target"]))
            serve.interrupt()
            report["exit_code"] = serve.wait_gone()
            report["left_behind"] = actors_left(machines)
            if report["exit_code"] or report["unrest"]:
                print(serve.stderr[-5000:], file=sys.stderr)
    finally:
        machines.shut_down()
    print(json.dumps(report, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(report))
    is_well = report["right"] == report["streams"] and not report["unrest"] and not report["left_behind"]
    return 0 if is_well and report["exit_code"] == 0 else 1


async def _run(machines: Machines, target: str, main_thread: MainThread) -> dict[str, Any]:
    async with GatewayClient(target) as client:
        before = await client.describe()
        vocab_size = (await client.model_info())["vocab_size"]
        questions = make_questions(random.Random(1), NUM_QUESTIONS, vocab_size, MAX_TOKENS)
        clients = Clients(target, await answer_all(client, questions), NUM_CLIENTS, seed=1)
        streaming = asyncio.create_task(clients.run())
        await asyncio.sleep(BEFORE_S)
        busiest = max((await client.describe())["workers"], key=lambda worker: worker["requests"]["running"])
        await main_thread.run(partial(machines.kill, machines.raylet_of(busiest["pid"])))
        killed_at = time.monotonic()
        await asyncio.sleep(AFTER_S)
        without = await client.describe()
        while await main_thread.run(machines.replenish):  # until no node is missing; one may be slow to start
            pass
        healed_after_s, unrest = await until_healed(client, NUM_PREFILL + NUM_DECODE, at_rest=False)
        clients.stop()
        await streaming
        _, still = await until_healed(client, NUM_PREFILL + NUM_DECODE)
        after = await client.describe()
    tally = clients.tally
    return {
        "nodes": len({worker["node"] for worker in before["workers"]}),
        "placed_on": [node["workers"] for node in before["nodes"]],
        "serving_without": sum(worker["state"] == "ready" for worker in without["workers"]),
        "incarnations_kept": sum(
            one["incarnation"] == other["incarnation"]
            for one, other in zip(before["workers"], after["workers"], strict=True)
        ),
        "whole_after_s": time.monotonic() - killed_at,
        "healed_after_s": healed_after_s,
        "unrest": unrest + still,
        "streams": tally.num_streams,
        "right": tally.num_right,
        "moved": tally.num_moved,
        "wrong": tally.wrong,
        "longest_stall_s": max(tally.longest_gaps, default=0.0),
    }


if __name__ == "__main__":
    sys.exit(main())
