"""A real worker for tests that break it. It is warm before a test needs it, and answers questions.

    python -m tests.factories.warm_worker --config FILE [--interpreted]

The test and the worker exchange lines of JSON. The worker prints "warm" once everything is imported. It then
receives `{"role", "name", "ports"}`, starts, and prints its endpoint. The ports may be chosen by the test.
From then on, it answers every line with its state. After the line "hang", no step of its engine ends. Prompts
that begin with BREAKS_STEPS or KILLS_WORKERS do what these names say. The worker ends when its stdin ends.
With --interpreted, it has a GPU's engine with interpreted kernels.
"""

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zmq

from baton.config import BatonConfig
from baton.step import SchedulerOutput
from baton.worker import WorkerRole
from engine.runner import LaunchedStep, ModelRunner
from tests.factories.sabotage import hang
from tests.factories.security import KEYS
from worker.host import EngineHost
from worker.process import build_worker
from worker.ready_line import endpoint_to_json

BREAKS_STEPS, KILLS_WORKERS = 291, 292


def main() -> None:
    suffer_from_prompts()
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--interpreted", action="store_true")
    options = parser.parse_args()
    if options.interpreted:
        from tests.factories.interpreted_engine import interpret_kernels  # most workers need no Triton

        interpret_kernels()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = BatonConfig.from_yaml(options.config)
    say("warm")
    if not (line := sys.stdin.readline()):
        return
    command = json.loads(line)
    bind_to(command["ports"])
    host = build_worker(config, KEYS, Path(config.model.path), WorkerRole(command["role"]), command["name"])
    say(json.loads(endpoint_to_json(host.start())))
    for line in sys.stdin:
        if json.loads(line) == "hang":
            hang()
        say(describe(host))
    host.stop()


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def bind_to(ports: Sequence[int]) -> None:
    """Makes the worker bind these ports.

    Otherwise, workers bind to port 0: then a restarted worker gets the ports of its predecessor only by chance.
    """
    if not ports:
        return
    left = iter(ports)

    def bind(socket: "zmq.Socket[bytes]", address: str) -> int:
        port = next(left)
        socket.bind(f"{address}:{port}")
        return port

    zmq.Socket.bind_to_random_port = bind  # type: ignore[method-assign, assignment]


def suffer_from_prompts() -> None:
    poisons: dict[str, int] = {}
    launch = ModelRunner.launch

    def launch_or_suffer(runner: ModelRunner, plan: SchedulerOutput) -> LaunchedStep:
        poisons.update({new.request_id: new.prompt_token_ids[0] for new in plan.scheduled_new_reqs})
        present = {poisons[request_id] for request_id in plan.num_scheduled_tokens}
        if KILLS_WORKERS in present:
            signal.raise_signal(signal.SIGSEGV)  # in this thread: after os.kill it might continue, and answer
        if BREAKS_STEPS in present:
            raise ValueError("a request breaks the step")
        return launch(runner, plan)

    ModelRunner.launch = launch_or_suffer  # type: ignore[method-assign, assignment]


def describe(host: EngineHost) -> dict[str, Any]:
    """The content of a heartbeat, and facts that only the process itself can see."""
    status = host.status()
    return {
        "state": status.state.value,
        "kv_blocks": asdict(status.kv_blocks),
        "requests": asdict(status.requests),
        "counters": status.counters,
        "transports": sorted({peer.transport for peer in status.kv_peers if peer.done}),
        "num_transfers": len(host._parts.executor.device_engine.connector._endpoint),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "own_pools": pools("rw-s"),
        "mapped_pools": pools("r--s"),
    }


def pools(permissions: str) -> list[int]:
    """The inodes of the KV pools that this process has mapped with these permissions.

    It may write its own pools, and only read those of its peers.
    """
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return sorted({int(line[4]) for line in lines if line[1] == permissions and "/memfd:baton-kv" in line})


if __name__ == "__main__":
    main()
