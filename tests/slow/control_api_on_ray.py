"""The control API over real Ray nodes: a node leaves under load, a fleet's command and a gateway are killed.

    python -m tests.slow.control_api_on_ray

starts a head and two nodes on loopback, `baton fleet` on them, and a `baton gateway` that has no Ray to import.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gateway import GatewayClient
from tests.chaos.machines import Machines, prepare
from tests.factories.models import make_model_dir

PATIENCE_S = 240.0
BATON = [sys.executable, "-m", "cli.main"]
WITHOUT_RAY = [
    sys.executable,
    "-c",
    "import sys; sys.modules['ray'] = None; from cli.main import main; sys.exit(main(sys.argv[1:]))",
]
PROMPT, LONG = [5, 6, 7], 1500


def start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


async def ready(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = await asyncio.to_thread(process.stdout.readline)
    assert line, f"it ended with {process.wait()}"
    found: dict[str, Any] = json.loads(line)
    return found


async def answer(client: GatewayClient, max_tokens: int) -> list[int]:
    tokens: list[int] = []
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
    async for event in client.generate(token_ids=PROMPT, sampling=sampling):
        tokens += event.token_ids
    return tokens


async def all_serve(client: GatewayClient) -> dict[str, int]:
    """The process id of each worker, once three workers serve."""
    while True:
        description = await client.describe()
        pids = {
            worker["name"]: worker["pid"] for worker in description["workers"] if worker["state"] == "ready"
        }
        if len(pids) == 3 and description["controller"]["state"] == "answering":
            return pids
        await asyncio.sleep(0.2)


async def workers_by_node(client: GatewayClient) -> dict[str, list[str]]:
    return {node["name"]: node["workers"] for node in (await client.describe())["nodes"]}


async def drain(node: str, server: str) -> None:
    command = [*BATON, "drain", "--node", node, "--fleet-address", server, "--timeout", "60"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


async def exercise(address: str, folder: Path) -> None:
    model = make_model_dir(folder / "tiny", max_position_embeddings=4096)
    sections = {
        "model": {"path": str(model), "load_format": "dummy", "dtype": "float32"},
        "engine": {"kv_cache_memory_mib": 32, "num_threads": 1},
        "kv_transfer": {"lease_s": 2.0},
        "cluster": {"name": "blue", "prefill": 1, "decode": 2, "drain_timeout_s": 0.2},
    }
    config = folder / "baton.yaml"
    config.write_text(json.dumps(sections))
    fleet = start([*BATON, "fleet", str(config), "--ray-address", address, "--json"])
    started = [fleet]
    try:
        server = (await ready(fleet))["fleet"]
        options = ["--fleet-address", server, "--grpc-port", "0", "--http-port", "0", "--json"]
        gateway = start([*WITHOUT_RAY, "gateway", str(config), *options])
        started.append(gateway)
        async with GatewayClient((await ready(gateway))["target"]) as client:
            await all_serve(client)
            expected = await answer(client, LONG)
            before = await workers_by_node(client)
            leaving = max(before, key=lambda name: len(before[name]))
            load = [asyncio.create_task(answer(client, LONG)) for _ in range(4)]
            await asyncio.sleep(0.5)
            await drain(leaving, server)
            assert (await workers_by_node(client))[leaving] == []
            assert await asyncio.gather(*load) == [expected] * 4
            pids = await all_serve(client)
            assert (await workers_by_node(client))[leaving] == []
            await drain(leaving, server)  # at once, and no request is harmed
            print("a node left", flush=True)

            fleet.kill()
            fleet.wait()
            assert await answer(client, LONG) == expected
            port = ["--fleet-port", server.rpartition(":")[2]]
            started.append(start([*BATON, "fleet", str(config), "--ray-address", address, "--json", *port]))
            assert (await ready(started[-1]))["fleet"] == server
            assert await all_serve(client) == pids
            assert await answer(client, LONG) == expected
            print("the fleet's command came back", flush=True)
            gateway.kill()
            gateway.wait()
        started[-1].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(started[-1].wait) == 0
    finally:
        for process in started:
            process.kill()


def main() -> None:
    prepare(os.environ)
    os.environ["BATON_CLUSTER_SECRET"] = "0123456789abcdef" * 4
    machines = Machines(num_nodes=2, cpus_per_node=3)
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(asyncio.wait_for(exercise(machines.address, Path(folder)), PATIENCE_S))
    finally:
        machines.shut_down()
    print("all well")


if __name__ == "__main__":
    main()
