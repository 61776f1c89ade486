"""The main promise: wherever a prompt is computed, the tokens are those of transformers.

A real model, real worker processes, the real gateway and its gRPC API; in float32, since batches of different shapes
round differently in bfloat16.
"""

import asyncio
from itertools import count
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoTokenizer

from baton.config import BatonConfig
from tests.factories.gguf_files import transformers_model
from tests.factories.local_cluster import HANDING_OVER, Answer, LocalCluster, local_cluster
from tests.factories.models import make_draft_pair, make_model_dir

pytestmark = pytest.mark.slow

NUM_NEW_TOKENS = 4
NUM_TO_PREEMPT = 36
"""More tokens than a block has, so that every request needs a block beyond its prompt's."""
NUM_TO_REPEAT = 80
"""Tokens after which every answer has repeated some of its own."""
MAX_TURNS = 20
ALONE_EVERY = 4
"""Every fourth of the prompts that are sent together is sent alone, too."""

LENGTHS = [129, 1, 17]
"""Lengths beyond the ends of blocks and of a step. A real model takes long; the tiny models below cover other
lengths."""
Mode = Literal["disaggregated", "local"]
MODES: tuple[Mode, ...] = ("disaggregated", "local")


def make_config(
    speculation: dict[str, object] | None = None, dtype: str = "float32", **scheduler: object
) -> BatonConfig:
    return BatonConfig.from_mapping(
        {
            "model": {"dtype": dtype, "quantization": "none"},
            "engine": {"num_threads": 1, "kv_cache_memory_mib": 256},
            "scheduler": {"max_num_batched_tokens": 128, **scheduler},
            "speculation": speculation or {},
            "gateway": HANDING_OVER,
            "network": {"heartbeat_interval_s": 0.05, "peer_timeout_s": 60.0},
            "kv_transfer": {"peer_timeout_s": 60.0, "lease_s": 60.0},
        }
    )


@pytest.fixture(scope="session")
def prompts(smollm2: Path) -> list[list[int]]:
    """Real text in many lengths; each prompt begins at another place."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokens = AutoTokenizer.from_pretrained(smollm2)(text)["input_ids"]
    return [tokens[17 * i : 17 * i + length] for i, length in enumerate(LENGTHS)]


def random_prompts(lengths: list[int]) -> list[list[int]]:
    """For a tiny model."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 290, (length,), generator=generator).tolist() for length in lengths]


def reference(folder: Path, prompts: list[list[int]], num_new_tokens: int) -> list[tuple[int, ...]]:
    """Each prompt's greedy answer by transformers."""
    model = transformers_model(folder)
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = torch.tensor([prompt])
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=num_new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            answers.append(tuple(out[0, len(prompt) :].tolist()))
    return answers


async def ask(cluster: LocalCluster, prompt: list[int], mode: Mode, salt: str, **sampling: object) -> Answer:
    options = {"temperature": 0.0, "max_tokens": NUM_NEW_TOKENS, "ignore_eos": True} | sampling
    answer = await cluster.answer(prompt, mode, cache_salt=salt, **options)
    assert answer.completion.placement["mode"] == mode
    assert answer.completion.usage["prompt_tokens"] == len(prompt)
    return answer


async def ask_all(
    cluster: LocalCluster,
    prompts: list[list[int]],
    mode: Mode,
    salt: str,
    num_at_once: int,
    **sampling: object,
) -> list[tuple[int, ...]]:
    """Every prompt's answer; the salt keeps one run's prefix cache from answering another's prompts."""
    slots = asyncio.Semaphore(num_at_once)

    async def one(prompt: list[int]) -> tuple[int, ...]:
        async with slots:
            return (await ask(cluster, prompt, mode, salt, **sampling)).token_ids

    return await asyncio.gather(*[one(prompt) for prompt in prompts])


async def check_same_tokens(
    cluster: LocalCluster, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    for mode in MODES:
        for num_at_once, every in ((1, ALONE_EVERY), (16, 1)):
            asked = prompts[::every]
            answers = await ask_all(cluster, asked, mode, f"{mode} {num_at_once}", num_at_once)
            wrong = [len(p) for p, a, e in zip(asked, answers, expected[::every], strict=True) if a != e]
            assert not wrong, (
                f"{mode}, {num_at_once} at once: prompts of {wrong} tokens differ from transformers"
            )
            await cluster.at_rest()


def test_a_real_model_answers_as_transformers_does(smollm2: Path, prompts: list[list[int]]) -> None:
    expected = reference(smollm2, prompts, NUM_NEW_TOKENS)

    async def run() -> None:
        async with local_cluster(make_config(), smollm2) as cluster:
            await check_same_tokens(cluster, prompts, expected)
            # Sampled: the seed decides, not the worker.
            short = prompts[1:3]
            sampled = [
                await ask_all(
                    cluster, short, mode, f"sampled {mode}", 4, seed=11, temperature=0.9, top_p=0.95
                )
                for mode in MODES
            ]
            assert sampled[0] == sampled[1]
            assert sampled[0] != expected[:2]
            await cluster.at_rest()
            num_disaggregated = len(prompts) + len(prompts[::ALONE_EVERY]) + len(short)
            assert (await cluster.counters("w1"))["kv_loads_received"] == num_disaggregated

    asyncio.run(run())


def test_a_pool_so_small_that_requests_are_preempted_changes_nothing(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "model")
    # Each answer needs two or three blocks in addition to those of its prompt, but the gateway leaves room for only
    # one. So two requests that fit side by side at first do not fit until their ends.
    prompts = random_prompts([15, 17, 32, 33, 48, 64, 65, 80, 95, 97])
    expected = reference(folder, prompts, NUM_TO_PREEMPT)

    async def run() -> None:
        async with local_cluster(make_config(num_blocks=12), folder) as cluster:
            # If a prefill worker may compute the prompt again, the request is given back instead.
            counters: dict[Mode, str] = {"disaggregated": "requests_given_back", "local": "preemptions"}
            for mode, counter in counters.items():
                for turn in count():  # the machine decides which requests meet
                    salt = f"{mode} {turn}"
                    answers = await ask_all(cluster, prompts, mode, salt, 12, max_tokens=NUM_TO_PREEMPT)
                    assert answers == expected, mode
                    await cluster.at_rest()
                    if (await cluster.counters("w1")).get(
                        counter, 0
                    ) > 0:  # the counter appears when it was counted once
                        break
                    assert turn < MAX_TURNS, f"no {counter}"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
        # test_families.py compares every family with transformers in one process
        pytest.param(
            "mistral",
            {"sliding_window": 40, "num_attention_heads": 6, "hidden_size": 96},
            marks=pytest.mark.by_hand,
        ),
    ],
)
def test_other_architectures_answer_as_transformers_does(
    architecture: str, overrides: dict[str, object], tmp_path: Path
) -> None:
    folder = make_model_dir(tmp_path / "model", architecture, **overrides)
    # Lengths near the ends of blocks, and of steps of 48 tokens; then a prompt longer than any earlier step.
    prompts = random_prompts(
        [1, *[16 * block + by for block in (1, 2, 3, 6, 9) for by in (-1, 0, 1)], 300, 700]
    )
    expected = reference(folder, prompts, NUM_NEW_TOKENS)

    async def run() -> None:
        config = make_config(max_num_batched_tokens=48)
        async with local_cluster(config, folder) as cluster:
            await check_same_tokens(cluster, prompts, expected)

    asyncio.run(run())


def test_c62_workers_that_guess_tokens_answer_as_transformers_does(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "model")
    prompts = random_prompts([5, 16, 33, 80])
    expected = reference(folder, prompts, NUM_TO_REPEAT)

    async def run() -> None:
        async with local_cluster(make_config({"method": "ngram"}), folder) as cluster:
            for mode in MODES:
                answers = await ask_all(cluster, prompts, mode, mode, 2, max_tokens=NUM_TO_REPEAT)
                assert answers == expected, mode
                alone = [await ask(cluster, each, mode, mode, max_tokens=NUM_TO_REPEAT) for each in prompts]
                usages = [answer.completion.usage for answer in alone]
                num_right = sum(usage["accepted_draft_tokens"] for usage in usages)
                assert 0 < num_right < sum(usage["draft_tokens"] for usage in usages)
            await cluster.at_rest()
            prefill, decode = [await cluster.counters(name) for name in ("w0", "w1")]
            assert 0 < decode["spec_decode_num_accepted_tokens"] < decode["spec_decode_num_draft_tokens"]
            assert "spec_decode_num_drafts" not in prefill

    asyncio.run(run())


def test_c62_workers_with_a_draft_model_answer_as_transformers_does(tmp_path: Path) -> None:
    folder, first_layers = make_draft_pair(tmp_path)
    prompts = random_prompts([5, 33, 80])
    expected = reference(folder, prompts, NUM_TO_PREEMPT)
    speculation: dict[str, object] = {"method": "draft_model", "draft_model": str(first_layers)}

    async def run() -> None:
        async with local_cluster(make_config(speculation), folder) as cluster:
            answers = await ask_all(
                cluster, prompts, "disaggregated", "disaggregated", 1, max_tokens=NUM_TO_PREEMPT
            )
            assert answers == expected
            await cluster.at_rest()
            prefill, decode = [await cluster.counters(name) for name in ("w0", "w1")]
            assert decode["spec_decode_num_accepted_tokens"] > 0
            assert "spec_decode_num_drafts" not in prefill

    asyncio.run(run())
