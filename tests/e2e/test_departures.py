"""Clients and workers that vanish: every block comes home, and whoever stays is served."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.config import BatonConfig
from cluster.child_processes import child_processes
from gateway import GatewayClient
from tests.factories.local_cluster import LocalCluster
from tests.factories.models import make_model_dir

pytestmark = pytest.mark.slow

NUM_KILLED_CLIENTS = 50
NUM_AT_ONCE = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"), max_position_embeddings=16_384)


def make_config(**cluster: int) -> BatonConfig:
    return BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32"},
            "engine": {"kv_cache_memory_mib": 64, "num_threads": 1},
            "scheduler": {"max_num_batched_tokens": 64},
            "gateway": {"grpc_port": 0},
            "network": {"heartbeat_interval_s": 0.05, "peer_timeout_s": 2.0},
            "kv_transfer": {"peer_timeout_s": 2.0, "lease_s": 4.0},
            "cluster": cluster,
        }
    )


async def kill_a_client(target: str, mode: str) -> None:
    """`baton generate` in a process of its own, killed once it has printed something."""
    arguments = ["--target", target, "--max-tokens", "16000", "--ignore-eos", "--raw", "--mode", mode]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "cluster.cli", "generate", *arguments, "The cache is the baton. " * 20],
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.read(1), 60)
    process.send_signal(signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL


def test_killing_clients_in_mid_stream_leaves_nothing_behind(folder: Path) -> None:
    async def run() -> None:
        async with child_processes(make_config(), folder) as running, GatewayClient(running.target) as client:
            cluster = LocalCluster(client, running.workers)
            for _ in range(NUM_KILLED_CLIENTS // NUM_AT_ONCE):
                modes = ["disaggregated"] * (NUM_AT_ONCE - 2) + ["local"] * 2
                await asyncio.gather(*[kill_a_client(running.target, mode) for mode in modes])
            description = await cluster.at_rest()
            assert description["gateway"]["in_flight"] == 0
            answer = await cluster.answer([5, 6, 7], "disaggregated", max_tokens=4, ignore_eos=True)
            assert len(answer.token_ids) == 4

    asyncio.run(run())


@pytest.mark.parametrize("victim", ["w0", "w1"])
def test_c52_a_killed_worker_costs_no_request_and_no_token(folder: Path, victim: str) -> None:
    """Two of each role; the victim goes while many requests are in every stage."""

    async def run() -> None:
        config = make_config(prefill=2, decode=2)
        async with child_processes(config, folder) as running, GatewayClient(running.target) as client:
            cluster = LocalCluster(client, running.workers)
            prompts = [[3 + (7 * i + j) % 280 for j in range(20 + 13 * i)] for i in range(16)]
            sampling: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "temperature": 0.8, "seed": 5}
            quiet = await asyncio.gather(
                *[cluster.answer(p, cache_salt="quiet", **sampling) for p in prompts]
            )
            calls = [asyncio.create_task(cluster.answer(p, cache_salt="storm", **sampling)) for p in prompts]
            await asyncio.sleep(0.1)
            running.workers[victim].send_signal(signal.SIGKILL)
            answers = await asyncio.gather(*calls)
            assert [a.token_ids for a in answers] == [a.token_ids for a in quiet]
            async with asyncio.timeout(10):
                while "dead" not in {w["state"] for w in (await client.describe())["workers"]}:
                    await asyncio.sleep(0.05)
            description = await cluster.at_rest()
            assert description["gateway"]["in_flight"] == 0

    asyncio.run(run())
