"""Tokens equal transformers' own, however the scheduler cuts, orders, preempts and plans ahead; on the real model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.clock import SystemClock
from baton.config import ModelConfig, SchedulerConfig
from baton.request import EngineRequest
from baton.sampling import SamplingParams
from engine.core import EngineCore
from engine.kv_cache import HostBlocks, KVPool
from engine.loader import LoadedModel, load_model
from engine.pipeline import make_pipeline
from engine.runner_parts import make_runner
from kv_transfer import KVConnectorScheduler
from scheduler import Scheduler
from tests.factories.engine import FakeConnectorWorker, make_grammars

pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
NUM_BLOCKS = 10
"""Too few for all requests at once: their prompts fit, their answers do not."""
NUM_SWAP_BLOCKS = 6
NUM_NEW_TOKENS = 24
TEXTS = [
    "The capital of France is",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen,",
    "A cache keeps what was computed once, so that it need not be computed again. A scheduler decides",
]
BUDGETS = [1, 7, 33, 512]
PREEMPTIONS = ["recompute", "swap", "auto"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Steps this small gain little by threads, and lose much on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> LoadedModel:
    return load_model(ModelConfig(dtype="float32"), smollm2, torch.device("cpu"))


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> dict[tuple[int, ...], list[int]]:
    """Prompt to greedy answer, one prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    reference: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    answers = {}
    for text in TEXTS:
        input_ids = tokenizer(text, return_tensors="pt").input_ids
        output = reference.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=NUM_NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
        )
        answers[tuple(input_ids[0].tolist())] = output[0, input_ids.shape[1] :].tolist()
    return answers


def make_core(model: LoadedModel, **settings: Any) -> EngineCore:
    num_swap_blocks = 0 if settings["preemption"] == "recompute" else NUM_SWAP_BLOCKS
    config = SchedulerConfig(
        max_model_len=512,
        num_blocks=NUM_BLOCKS,
        num_swap_blocks=num_swap_blocks or None,
        block_size=BLOCK_SIZE,
        **settings,
    )
    pool = KVPool(NUM_BLOCKS, model.kv_block_shape(BLOCK_SIZE), model.device)
    runner = make_runner(model, pool, HostBlocks(num_swap_blocks, pool))
    return EngineCore(
        Scheduler(config, KVConnectorScheduler(BLOCK_SIZE)),
        make_pipeline(runner, async_scheduling=config.async_scheduling),
        FakeConnectorWorker(),
        make_grammars(),
        (),
        SystemClock(),
    )


def answers_of(core: EngineCore, prompts: list[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS)
    for number, prompt in enumerate(prompts):
        request = EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params)
        core.add_request(request, "test")
    answers: dict[tuple[int, ...], list[int]] = {prompt: [] for prompt in prompts}
    core.may_progress = True
    while core.may_progress:
        for output in core.step().get("test", []):
            answer = answers[prompts[int(output.request_id)]]
            assert output.first_position == len(answer)
            answer += output.token_ids
    core.close()
    return answers


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("preemption", PREEMPTIONS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_chunked_prefill_preemption_and_planning_ahead_change_no_token(
    model: LoadedModel,
    expected: dict[tuple[int, ...], list[int]],
    budget: int,
    preemption: str,
    async_scheduling: bool,
) -> None:
    core = make_core(
        model, max_num_batched_tokens=budget, preemption=preemption, async_scheduling=async_scheduling
    )
    assert answers_of(core, list(expected)) == expected
    counters = core.counters()
    if budget > 1:  # a budget of one serves one request at a time
        assert counters["preemptions"] > 0
        assert (counters.get("swapped_in_blocks", 0) > 0) == (preemption != "recompute")
    blocks = core.kv_block_counts()
    assert (blocks.free, blocks.host_used) == (blocks.total, 0)


@pytest.mark.parametrize("preemption", PREEMPTIONS)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_two_phase_scheduler_gives_the_same_tokens(
    model: LoadedModel, expected: dict[tuple[int, ...], list[int]], policy: str, preemption: str
) -> None:
    core = make_core(
        model,
        batching="prefill_first",
        max_num_batched_tokens=128,
        preemption=preemption,
        policy=policy,
        enable_prefix_caching=False,
    )
    assert answers_of(core, list(expected)) == expected
    assert core.counters()["preemptions"] > 0
