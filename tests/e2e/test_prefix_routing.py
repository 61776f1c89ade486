"""Requests find the workers that have their prefixes: real workers report what they cache, and the gateway follows."""

import asyncio
from pathlib import Path

import pytest

from baton.config import BatonConfig
from baton.errors import FleetError
from baton.messages.control import FlushCache
from tests.factories.local_cluster import LocalCluster, local_cluster
from tests.factories.models import make_model_dir

pytestmark = pytest.mark.slow

NUM_PREFILL = 3
NUM_ROUNDS = 3
DECODE = f"w{NUM_PREFILL}"
PROMPTS = [[5 + (7 * number + step) % 90 for step in range(100)] for number in range(4)]
CACHED = 96
"""Of 100 tokens, in blocks of 16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


def make_config(policy: str) -> BatonConfig:
    return BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32"},
            "engine": {"kv_cache_memory_mib": 16, "num_threads": 1},
            "gateway": {"grpc_port": 0, "http_port": None, "routing_policy": policy},
            "network": {"heartbeat_interval_s": 0.05},
            "cluster": {"prefill": NUM_PREFILL, "decode": 1},
        }
    )


def test_a_prompt_returns_to_the_prefill_worker_that_has_it(folder: Path) -> None:
    """Turns would lead elsewhere each time: there are four prompts, and three workers."""

    async def run() -> None:
        async with local_cluster(make_config("kv_aware"), folder) as cluster:
            homes: dict[int, str] = {}
            for attempt in range(NUM_ROUNDS):
                for number, prompt in enumerate(PROMPTS):
                    answer = await cluster.answer(prompt, max_tokens=2, ignore_eos=True)
                    placement, usage = answer.completion.placement, answer.completion.usage
                    assert homes.setdefault(number, placement["prefill"]) == placement["prefill"]
                    if attempt:
                        assert usage["cached_tokens"] == CACHED
                    await cluster.at_rest()
            await leave_caches_unread(cluster)
            await flush(cluster)

    asyncio.run(run())


async def num_cached(cluster: LocalCluster, **options: bool | int) -> int:
    """Of the first prompt."""
    answer = await cluster.answer(PROMPTS[0], max_tokens=2, ignore_eos=True, **options)
    await cluster.at_rest()
    return int(answer.completion.usage["cached_tokens"])


async def leave_caches_unread(cluster: LocalCluster) -> None:
    assert await num_cached(cluster, skip_reading_prefix_cache=True) == 0
    assert await num_cached(cluster) == CACHED
    options = {"max_tokens": 50, "ignore_eos": True, "max_model_len": len(PROMPTS[0]) + 7}
    answer = await cluster.answer(PROMPTS[0], **options)
    assert (len(answer.token_ids), answer.completion.finish_reason) == (7, "length")
    whole = await cluster.answer(PROMPTS[0], max_tokens=50, ignore_eos=True, temperature=0.0)
    again = {"temperature": 0.0, "skip_reading_prefix_cache": True}
    assert (await cluster.answer(PROMPTS[0], **options, **again)).token_ids == whole.token_ids[:7]


async def flush(cluster: LocalCluster) -> None:
    """While a request runs, its worker refuses; forced, it takes no token from it."""
    sampling = {"max_tokens": 800, "ignore_eos": True, "temperature": 0.0}
    expected = await cluster.answer([5] * 40, "local", **sampling)
    await cluster.at_rest()
    tokens: list[int] = []
    flushed = False
    async for event in cluster.client.generate(token_ids=[5] * 40, sampling=sampling, mode="local"):
        tokens += event.token_ids
        if not flushed:
            decode = cluster.workers[DECODE]
            with pytest.raises(FleetError, match=r"blocks are in use \(1 requests run\)"):
                await decode.call(FlushCache(force=False, timeout_s=60.0))
            await decode.call(FlushCache(force=True, timeout_s=60.0))
            flushed = True
    assert tuple(tokens) == expected.token_ids
    await cluster.at_rest()
    assert (await cluster.counters(DECODE))["preemptions"] == 1
    assert await num_cached(cluster) == CACHED, "prefill workers keep theirs"
    for worker in cluster.workers.values():
        await worker.call(FlushCache(force=False, timeout_s=60.0))
    assert await num_cached(cluster) == 0
    assert await num_cached(cluster) == CACHED
