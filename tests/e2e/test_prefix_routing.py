"""Requests find the workers that have their prefixes: real workers report what they cache, and the gateway follows."""

import asyncio
from pathlib import Path

import pytest

from baton.config import BatonConfig
from tests.factories.local_cluster import HANDING_OVER, local_cluster
from tests.factories.models import make_model_dir

pytestmark = pytest.mark.slow

NUM_PREFILL = 3
NUM_ROUNDS = 3
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
            "gateway": {**HANDING_OVER, "routing_policy": policy},
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

    asyncio.run(run())
