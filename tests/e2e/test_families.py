"""Every family's greedy tokens and logits equal transformers', however its prompts are computed.

`test_model_parity.py` has the options of Llama, Mistral and Qwen.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.config import ModelConfig
from baton.sampling import MAX_LOGPROBS, SamplingParams
from engine.collectives import Collectives
from engine.families import ARCHITECTURES, Family
from engine.layers.torch_backend import TorchBackend
from engine.loading.loader import LoadedModel, load_model
from tests.e2e.test_same_tokens import check_same_tokens, make_config, random_prompts, reference
from tests.factories.families import CASES, PAGE, renewed
from tests.factories.local_cluster import local_cluster
from tests.factories.models import make_model_dir
from tests.factories.stepping import StepDriver, generate_from_copied_blocks, load_on_cpu
from tests.factories.threaded_ranks import on_ranks

CPU = torch.device("cpu")
FLOAT32 = ModelConfig(dtype="float32")
NUM_TOKENS = 8
CHUNK = 7
PROMPTS = {str(length): [(37 * i + 11 * length) % 290 + 3 for i in range(length)] for length in (5, 16, 41)}


def check_batch(
    model: LoadedModel, theirs: Any, prompts: dict[str, list[int]] = PROMPTS, num_tokens: int = NUM_TOKENS
) -> dict[str, list[int]]:
    """Computes all prompts at once, in chunks of 4 and shuffled blocks of 4. Steps mix chunks and decodes."""
    driver = StepDriver(model)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=MAX_LOGPROBS)
    requests = [driver.add(name, prompt, params) for name, prompt in prompts.items()]
    while running := [request for request in requests if len(request.outputs) < num_tokens]:
        driver.step({r.request_id: min(CHUNK, r.num_tokens - r.num_computed) for r in running})
    for request in requests:
        with torch.inference_mode():
            whole = theirs(torch.tensor([[*request.prompt, *request.outputs]])).logits[0]
        logits = whole[len(request.prompt) - 1 : -1]
        assert request.outputs == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1)
        for position, logprobs in enumerate(request.logprobs):
            token_ids = [token_id for token_id, _ in logprobs.top]
            values = torch.tensor([value for _, value in logprobs.top])
            torch.testing.assert_close(values, expected[position, token_ids], rtol=0, atol=2e-4)
    return {request.request_id: request.outputs for request in requests}


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path = make_model_dir(tmp_path, case.architecture, **case.overrides)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = load_model(FLOAT32, path, CPU)
    batched = check_batch(model, theirs)

    longest, prompt = max(PROMPTS.items(), key=lambda item: len(item[1]))
    alone = StepDriver(model, block_size=16).generate({longest: prompt}, NUM_TOKENS)
    assert alone == {longest: batched[longest]}
    assert generate_from_copied_blocks(model, prompt, NUM_TOKENS) == batched[longest]

    def on_rank(collectives: Collectives, *, expert_parallel: bool = False) -> dict[str, list[int]]:
        share = load_model(FLOAT32, path, CPU, collectives=collectives, expert_parallel=expert_parallel)
        return StepDriver(share).generate(PROMPTS, NUM_TOKENS, chunk=CHUNK)

    assert on_ranks(2, on_rank) == [batched, batched]
    if any(model.architecture.mixtures):
        assert on_ranks(2, partial(on_rank, expert_parallel=True)) == [batched, batched]

    assert check_batch(load_model(FLOAT32, path, CPU, TorchBackend()), theirs) == batched


@pytest.mark.parametrize("name", ["olmo2", "gemma2", "gemma3", "gpt oss", "deepseek v3", "minimax m2"])
def test_bfloat16_stays_close_to_transformers(tmp_path: Path, name: str) -> None:
    """These families have special norms or sinks, or attend to latents."""
    case = CASES[name]
    path = make_model_dir(tmp_path, case.architecture, **case.overrides, dtype="bfloat16")
    check_bfloat16(path, PROMPTS["41"], 20)


def check_bfloat16(path: Path, prompt: list[int], chunk: int) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    driver = StepDriver(load_on_cpu(path, dtype="bfloat16"))
    request = driver.add("a", prompt, SamplingParams(temperature=0.0, max_tokens=8, logprobs=1))
    while len(request.outputs) < 8:
        driver.step({"a": min(chunk, request.num_tokens - request.num_computed)})
    with torch.inference_mode():
        logits = theirs(torch.tensor([[*request.prompt, *request.outputs]])).logits[0]
    expected = logits[len(request.prompt) - 1 : -1].log_softmax(-1)
    expected = expected.gather(1, torch.tensor(request.outputs).unsqueeze(1)).squeeze(1)
    found = torch.tensor([logprobs.logprob for logprobs in request.logprobs])
    assert (found - expected).abs().max() < 0.25


def test_every_family_is_compared() -> None:
    elsewhere = {Family.LLAMA, Family.MISTRAL, Family.QWEN2, Family.QWEN3}
    assert {case.family for case in CASES.values()} | elsewhere == set(ARCHITECTURES.values()) == set(Family)


def test_the_tables_of_the_page_are_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == renewed(page), "run: python -m tests.factories.families"


@pytest.mark.slow
@pytest.mark.by_hand
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_cluster_answers_as_transformers_does(tmp_path: Path, name: str, num_ranks: int) -> None:
    """Real workers and a gateway. Prompts end shortly before or after the ends of blocks and steps."""
    case = CASES[name]
    folder = make_model_dir(tmp_path / "model", case.architecture, **case.overrides)
    prompts = random_prompts([5, 15, 16, 17, 48, 49, 97, 300])
    expected = reference(folder, prompts, 4)
    config = make_config(max_num_batched_tokens=48)
    ranks = {"prefill_tensor_parallel": num_ranks, "decode_tensor_parallel": 2}
    config = config.model_copy(update={"cluster": config.cluster.with_values("cluster", **ranks)})

    async def run() -> None:
        async with local_cluster(config, folder) as cluster:
            await check_same_tokens(cluster, prompts, expected)

    asyncio.run(run())
