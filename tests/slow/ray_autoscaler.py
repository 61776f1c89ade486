"""Ray's own autoscaler beneath ours, on nodes that are processes.

    tests/slow/isolated.sh python -m tests.slow.ray_autoscaler WHAT

WHAT is `groups` (bare placement groups) or `fleet` (`baton serve`, a tiny model, clients that come and go). It needs
namespaces of its own: a fake provider's nodes find each other as if there were no other Ray on this machine.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ADDRESS = "127.0.0.1:6379"
PATIENCE_S = 240.0
"""For each thing that has to happen; on two cores that others use, too."""

HEAD = "ray.head.default"
"""The fake provider knows its head by this name alone; under another one, Ray would add heads without end."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "BATON_CLUSTER_SECRET": "0123456789abcdef" * 4,
}

EMPTY: dict[str, Any] = {
    **{key: {} for key in ("auth", "docker", "file_mounts")},
    **{f"{who}setup_commands": [] for who in ("", "head_", "worker_")},
    **{f"{who}_start_ray_commands": [] for who in ("head", "worker")},
    **{
        key: []
        for key in ("initialization_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter")
    },
    "file_mounts_sync_continuously": False,
}

CLUSTER: dict[str, Any] = {
    **EMPTY,
    "cluster_name": "fake_multinode",
    "max_workers": 8,
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.1,
    "provider": {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "head_node_type": HEAD,
    "available_node_types": {
        HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "prefill": {"resources": {"CPU": 1, "prefill": 1}, "node_config": {}, "max_workers": 1},
        "decode": {"resources": {"CPU": 1, "decode": 1}, "node_config": {}, "max_workers": 3},
    },
}

FLEET: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "engine": {"num_threads": 1},
    "scheduler": {"num_blocks": 40},
    "gateway": {"grpc_port": 0, "http_port": None, "routing_mode": "disaggregated"},
    "cluster": {
        "prefill": 1,
        "decode": 1,
        "ray_address": ADDRESS,
        "prefill_resources": {"prefill": 1.0},
        "decode_resources": {"decode": 1.0},
    },
    "autoscaling": {
        "mode": "on",
        "max_decode": 2,
        "target_block_use": 0.6,
        "interval_s": 1.0,
        "grow_after_s": 3.0,
        "grow_cooldown_s": 5.0,
        "shrink_after_s": 5.0,
        "shrink_cooldown_s": 5.0,
    },
}
NUM_CLIENTS = 6
"""Of 200 tokens each, so that one worker's blocks hold three of them."""


def say(text: str) -> None:
    print(f"{time.monotonic():8.1f}  {text}", flush=True)


def main(what: str) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp/ray"))  # which ends with these namespaces
    (folder / "cluster.json").write_text(json.dumps(CLUSTER))
    subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-cpus=0"),
            *("--node-ip-address=127.0.0.1", "--port=6379", "--include-dashboard=false"),
            *("--object-store-memory=100000000", f"--autoscaling-config={folder / 'cluster.json'}"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    say("the head is there")
    {"groups": scale_groups, "fleet": scale_fleet}[what](folder)
    say("all well")


def scale_groups(_: Path) -> None:
    """A placement group without room makes Ray add a node. When the group is removed, Ray removes the node."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    ray.init(ADDRESS, log_to_driver=False)
    groups = []
    for count in (1, 2):
        groups.append(placement_group([{"CPU": 1, "decode": 1}], strategy="STRICT_PACK"))
        ray.get(groups[-1].ready(), timeout=PATIENCE_S)
        assert num_nodes("decode") == count
        say(f"{count} groups, and as many nodes")
    while groups:
        remove_placement_group(groups.pop())
        wait_until(lambda: num_nodes("decode") == len(groups), f"{len(groups)} groups, and as many nodes")


def scale_fleet(folder: Path) -> None:
    """When clients come, a second decode worker starts on its own node. When they go, the worker ends, and then its
    node."""
    import ray

    from tests.factories.models import make_model_dir

    config = {**FLEET, "model": {**FLEET["model"], "path": str(make_model_dir(folder / "model"))}}
    (folder / "baton.yaml").write_text(json.dumps(config))
    serving = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "serve", str(folder / "baton.yaml"), "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert serving.stdout is not None
    line = serving.stdout.readline()
    assert line, f"baton serve ended with {serving.wait()}"
    ready = json.loads(line)
    say(f"serves at {ready['target']}: {[worker['name'] for worker in ready['workers']]}")
    ray.init(ADDRESS, log_to_driver=False)
    assert (num_nodes("prefill"), num_nodes("decode")) == (1, 1)
    asyncio.run(grow_and_shrink(ready["target"]))
    wait_until(lambda: num_nodes("decode") == 1, "the node of the worker that left is gone")
    serving.send_signal(signal.SIGINT)
    assert serving.wait(PATIENCE_S) == 0
    wait_until(lambda: num_nodes("decode") + num_nodes("prefill") == 0, "after the fleet, its nodes are gone")


async def grow_and_shrink(target: str) -> None:
    from gateway import GatewayClient

    async with GatewayClient(target) as client:
        stopping = asyncio.Event()
        clients = [asyncio.create_task(stream(client, stopping)) for _ in range(NUM_CLIENTS)]
        await wait_for(lambda: is_number_of_decoders(client, 2), "two decode workers serve")
        assert num_nodes("decode") == 2
        stopping.set()
        decoders = set[str]().union(*await asyncio.gather(*clients))  # raises the error of a failed request
        say(f"every request was answered whole, by {sorted(decoders)}")
        await wait_for(lambda: is_number_of_decoders(client, 1), "one decode worker is left")
        for sentence in (await client.describe())["controller"]["decisions"]:
            say(f"| {sentence}")


async def stream(client: Any, stopping: asyncio.Event) -> set[str]:
    """Sends one request after another, each of full length. Returns the workers that decoded them."""
    decoders: set[str] = set()
    sampling = {"max_tokens": 190, "ignore_eos": True, "temperature": 0.0}
    while not stopping.is_set():
        events = [event async for event in client.generate(text="Hello", sampling=sampling)]
        assert sum(len(event.token_ids) for event in events) == 190
        decoders.add(events[-1].completion.placement["decode"])
    return decoders


async def is_number_of_decoders(client: Any, count: int) -> bool:
    workers = (await client.describe())["workers"]
    return (
        [(w["role"], w["state"]) for w in workers].count(("decode", "ready"))
        == count
        == num_decoders(workers)
    )


def num_decoders(workers: list[dict[str, Any]]) -> int:
    return sum(worker["role"] == "decode" for worker in workers)


async def wait_for(condition: Callable[[], Any], what: str) -> None:
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < PATIENCE_S, f"still not so after {PATIENCE_S:g} s: {what}"
        await asyncio.sleep(0.5)
    say(f"{what}, after {time.monotonic() - began:.0f} s")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    async def ask() -> bool:
        return condition()

    asyncio.run(wait_for(ask, what))


def num_nodes(resource: str) -> int:
    import ray

    return sum(resource in node["Resources"] for node in ray.nodes() if node["Alive"])


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(sys.argv[1])
