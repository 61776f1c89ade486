"""Clients that vanish: every block is freed, and other clients are served. Workers: test_worker_faults.py."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from baton.config import BatonConfig
from cluster.serve.child_processes import child_processes
from gateway import GatewayClient
from tests.factories.local_cluster import LocalCluster
from tests.factories.models import make_model_dir

pytestmark = pytest.mark.slow

NUM_KILLED_CLIENTS = 6
NUM_AT_ONCE = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"), max_position_embeddings=16_384)


def make_config() -> BatonConfig:
    return BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32"},
            "engine": {"kv_cache_memory_mib": 64, "num_threads": 1},
            "scheduler": {"max_num_batched_tokens": 64},
            "gateway": {"grpc_port": 0, "http_port": None},
            # So long that no busy worker counts as lost, and that no block becomes free only because a lease ends.
            "network": {"heartbeat_interval_s": 0.05, "peer_timeout_s": 60.0},
            "kv_transfer": {"peer_timeout_s": 60.0, "lease_s": 300.0},
        }
    )


async def kill_a_client(target: str, mode: str) -> None:
    """Starts `baton generate` in a process of its own, and kills it once it has printed something."""
    arguments = ["--target", target, "--max-tokens", "16000", "--ignore-eos", "--raw", "--mode", mode]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "cli.main", "generate", *arguments, "The cache is the baton. " * 20],
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
            await cluster.at_rest()
            answer = await cluster.answer([5, 6, 7], "disaggregated", max_tokens=4, ignore_eos=True)
            assert len(answer.token_ids) == 4

    asyncio.run(run())
