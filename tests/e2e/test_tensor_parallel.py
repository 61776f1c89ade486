"""Workers of several ranks answer as workers of one do, also where P and D have different numbers of them."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.config import BatonConfig
from tests.factories.local_cluster import LocalCluster, local_cluster
from tests.factories.models import make_model_dir

pytestmark = pytest.mark.slow

NUM_NEW_TOKENS = 12
PROMPTS = [
    tuple((5 + 7 * i + 3 * j) % 250 for j in range(length)) for i, length in enumerate((1, 16, 33, 100, 200))
]


def make_config(
    model: dict[str, object] | None = None, engine: dict[str, object] | None = None, **cluster: object
) -> BatonConfig:
    return BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32", **(model or {})},
            "engine": {"num_threads": 1, "kv_cache_memory_mib": 8, **(engine or {})},
            "scheduler": {"max_num_batched_tokens": 64},
            "gateway": {"grpc_port": 0, "http_port": None},
            "network": {"heartbeat_interval_s": 0.05, "peer_timeout_s": 60.0},
            "kv_transfer": {"peer_timeout_s": 60.0},
            "cluster": cluster,
        }
    )


def rank_processes(cluster: LocalCluster, name: str) -> list[psutil.Process]:
    children = psutil.Process(cluster.workers[name].pid).children()
    return [child for child in children if "engine.ranks.entry" in child.cmdline()]


async def answers(cluster: LocalCluster, mode: str) -> list[tuple[int, ...]]:
    """Greedy answers to all prompts at once. Checks that nothing is held afterwards."""
    options = {"mode": mode, "max_tokens": NUM_NEW_TOKENS, "temperature": 0.0, "cache_salt": mode}
    found = await asyncio.gather(*[cluster.answer(prompt, **options) for prompt in PROMPTS])  # type: ignore[arg-type]
    await cluster.at_rest()
    return [answer.token_ids for answer in found]


# test_ranks_with_whole_experts has both differences
ONE_TO_TWO = pytest.param(1, 2, marks=pytest.mark.by_hand)


@pytest.mark.parametrize(("num_prefill_ranks", "num_decode_ranks"), [ONE_TO_TWO, (2, 2)])
def test_tokens_do_not_depend_on_the_number_of_ranks(
    folder: Path, num_prefill_ranks: int, num_decode_ranks: int
) -> None:
    """One cluster answers disaggregated and on D alone. If D has one rank, its answer alone is the answer without
    tensor parallelism."""

    async def run() -> None:
        config = make_config(
            prefill_tensor_parallel=num_prefill_ranks, decode_tensor_parallel=num_decode_ranks
        )
        async with local_cluster(config, folder) as cluster:
            ranks = [child for name in ("w0", "w1") for child in rank_processes(cluster, name)]
            assert len(ranks) == num_prefill_ranks + num_decode_ranks - 2
            await check_same_answers(cluster)
        assert not any(child.is_running() for child in ranks)

    asyncio.run(run())


async def check_same_answers(cluster: LocalCluster) -> None:
    assert await answers(cluster, "disaggregated") == await answers(cluster, "local")
    counters = await cluster.counters("w1")
    assert counters["kv_prompt_loads_done"] == len(PROMPTS)


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.by_hand), "decode"])
def test_ranks_with_whole_experts_hand_over_to_a_worker_without(tmp_path: Path, role: str) -> None:
    """Two ranks cannot divide an expert's columns, so each rank has whole experts. The other worker has all
    experts."""
    path = make_model_dir(tmp_path, "mixtral", num_local_experts=5, intermediate_size=33)
    ranks: dict[str, Any] = {f"{role}_tensor_parallel": 2, f"{role}_enable_expert_parallel": True}
    config = make_config(**ranks)

    async def run() -> None:
        async with local_cluster(config, path) as cluster:
            await check_same_answers(cluster)

    asyncio.run(run())


def test_a_worker_that_loses_a_rank_is_dead_and_says_why_and_others_answer(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the loss, a worker of two ranks hands over to a worker of one rank."""

    async def run() -> None:
        async with local_cluster(make_config(prefill_tensor_parallel=2), folder) as cluster:
            await check_same_answers(cluster)
            (rank,) = rank_processes(cluster, "w0")
            rank.send_signal(signal.SIGKILL)
            async with asyncio.timeout(60.0):
                while "w0" in await alive(cluster):
                    await asyncio.sleep(0.05)
            why = f"rank 1 (pid {rank.pid}) was killed by SIGKILL"
            lost = f"worker w0, which had no requests of this gateway, is lost: its engine is dead: {why}"
            assert lost in caplog.messages
            answer = await cluster.answer(PROMPTS[2], max_tokens=2, temperature=0.0)
            assert len(answer.token_ids) == 2

    async def alive(cluster: LocalCluster) -> set[str]:
        """The workers that the gateway does not know to be lost."""
        description = await cluster.client.describe()
        return {worker["name"] for worker in description["workers"] if worker["state"] != "dead"}

    asyncio.run(run())
