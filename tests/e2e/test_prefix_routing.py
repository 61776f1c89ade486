"""Requests find the workers that have their prefixes: real workers report what they cache, and the gateway follows."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.config import BatonConfig
from baton.errors import FleetError
from baton.messages.control import FlushCache, WaitStatus
from tests.factories import sabotage
from tests.factories.local_cluster import HANDING_OVER, LocalCluster, local_cluster
from tests.factories.models import make_model_dir

pytestmark = pytest.mark.slow

NUM_PREFILL = 3
NUM_ROUNDS = 3
DECODE = f"w{NUM_PREFILL}"
PROMPTS = [[5 + (7 * number + step) % 90 for step in range(801)] for number in range(4)]
CACHED = 800
"""In blocks of 16. One token is left to compute where a prompt is: no speed measured on a busy machine outweighs that.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


def make_config(policy: str) -> BatonConfig:
    return BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32"},
            "engine": {"kv_cache_memory_mib": 16, "num_threads": 1},
            "gateway": {**HANDING_OVER, "routing_policy": policy},
            "network": {"heartbeat_interval_s": 0.05},
            "cluster": {"prefill": NUM_PREFILL, "decode": 1},
        }
    )


def test_a_prompt_returns_to_the_prefill_worker_that_has_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turns, each prompt would go to another worker each time: there are four prompts and three workers."""
    for variable, value in sabotage.obeying(tmp_path).items():
        monkeypatch.setenv(variable, value)

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
            await flush(cluster, tmp_path)

    asyncio.run(run())


async def num_cached(cluster: LocalCluster, **options: Any) -> int:
    """Of the first prompt."""
    answer = await cluster.answer(PROMPTS[0], max_tokens=2, ignore_eos=True, **options)
    await cluster.at_rest()
    return int(answer.completion.usage["cached_tokens"])


async def leave_caches_unread(cluster: LocalCluster) -> None:
    assert await num_cached(cluster, skip_reading_prefix_cache=True) == 0
    assert await num_cached(cluster) == CACHED
    options: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True, "temperature": 0.0}
    whole = await cluster.answer(PROMPTS[0], **options)
    unread = await cluster.answer(PROMPTS[0], **options, skip_reading_prefix_cache=True)
    assert unread.token_ids == whole.token_ids
    short = await cluster.answer(PROMPTS[0], **options, max_model_len=len(PROMPTS[0]) + 7)
    assert (short.token_ids, short.completion.finish_reason) == (whole.token_ids[:7], "length")


async def flush(cluster: LocalCluster, folder: Path) -> None:
    """A worker in use refuses. With `force`, in the middle of hand-overs and answers, no token changes."""
    workers = {name: worker.control() for name, worker in cluster.workers.items()}

    async def ask_all() -> list[tuple[int, ...]]:
        options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.0}
        answers = await asyncio.gather(*[cluster.answer(prompt, **options) for prompt in PROMPTS])
        return [answer.token_ids for answer in answers]

    undisturbed = await ask_all()
    await sabotage.carried_out(folder, cluster.workers[DECODE].pid, "pace")
    asking = asyncio.create_task(ask_all())
    while (await workers[DECODE].call(WaitStatus(0.0))).requests.running == 0:
        assert not asking.done()
    with pytest.raises(FleetError, match=r"blocks are in use \(\d requests run"):
        await workers[DECODE].call(FlushCache(force=False, timeout_s=60.0))
    for _ in range(5):
        for worker in workers.values():
            await worker.call(FlushCache(force=True, timeout_s=60.0))
    assert await asking == undisturbed
    await cluster.at_rest()
    assert (await cluster.counters(DECODE))["preemptions"] > 0
    await num_cached(cluster)
    assert await num_cached(cluster) == CACHED
    for worker in workers.values():
        await worker.call(FlushCache(force=False, timeout_s=60.0))
    assert [await num_cached(cluster), await num_cached(cluster)] == [0, CACHED]
