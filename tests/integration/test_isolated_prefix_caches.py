"""`gateway.isolate_prefix_cache`: whether one caller learns from `cached_tokens` what another sent; real workers."""

from pathlib import Path

import httpx2
import pytest

from baton.config import BatonConfig
from cluster.serve.child_processes import child_processes
from tests.factories.api_keys import ALICE, API_KEYS, BOB

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]

BLOCK_SIZE = 16
PROMPT = [*range(5, 105)]
WHOLE_BLOCKS = len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize(("is_isolated", "seen_by_bob"), [(True, 0), (False, WHOLE_BLOCKS)])
async def test_c22_callers_share_cached_prefixes_only_if_the_operator_lets_them(
    folder: Path, is_isolated: bool, seen_by_bob: int
) -> None:
    config = BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32"},
            "engine": {"num_threads": 1},
            "scheduler": {"num_blocks": 100, "block_size": BLOCK_SIZE},
            "gateway": {
                "grpc_port": 0,
                "http_port": 0,
                "api_keys": [key.model_dump() for key in API_KEYS],
                "isolate_prefix_cache": is_isolated,
            },
            "cluster": {"prefill": 1, "decode": 1},
        }
    )
    async with child_processes(config, folder) as running, httpx2.AsyncClient(timeout=60.0) as http:

        async def cached_tokens(key: str, **extra: str) -> int:
            url = f"http://127.0.0.1:{running.gateway.http_port}/v1"
            headers = {"authorization": f"Bearer {key}"}
            (model,) = (await http.get(f"{url}/models", headers=headers)).json()["data"]
            body = {"model": model["id"], "prompt": PROMPT, "max_tokens": 3, **extra}
            answer = await http.post(f"{url}/completions", headers=headers, json=body)
            assert answer.status_code == 200, answer.text
            cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return cached

        assert await cached_tokens(ALICE) == 0
        assert await cached_tokens(ALICE) == WHOLE_BLOCKS
        assert await cached_tokens(BOB) == seen_by_bob
        assert await cached_tokens(BOB) == WHOLE_BLOCKS
        assert await cached_tokens(ALICE, cache_salt="mine") == 0, "a salt of one's own still separates"
        assert await cached_tokens(BOB, cache_salt="mine") == seen_by_bob
        assert await cached_tokens(ALICE, cache_salt="mine") == WHOLE_BLOCKS
