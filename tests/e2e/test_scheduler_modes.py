"""Tokens equal transformers' own, however the scheduler cuts, orders, preempts and plans ahead.

A tiny model is tested in every combination, the real model in a few, by hand.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from baton.clock import SystemClock
from baton.config import ModelConfig, SchedulerConfig
from baton.request import EngineRequest
from baton.sampling import SamplingParams
from engine.kv_cache import HostBlocks, KVPool
from engine.loading.loader import LoadedModel, load_model
from engine.pipeline import make_pipeline
from engine.runner_parts import make_runner
from scheduler import Scheduler
from tests.factories.engine import FakeBlockMover, make_grammars
from tests.factories.gguf_files import transformers_model
from worker.core import EngineCore
from worker.kv_connector_scheduler import KVConnectorScheduler

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
TINY_LENGTHS = [5, 17, 28, 20]
BUDGETS = [1, 7, 33, 512]
PREEMPTIONS = ["recompute", "swap"]


Answers = dict[tuple[int, ...], list[int]]
"""Prompt to greedy answer."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, and the greedy answers of transformers with its weights."""

    model: LoadedModel
    expected: Answers


def make_subject(folder: Path, prompts: list[list[int]]) -> Subject:
    """An answer equals that of transformers if each of its tokens is the likeliest one after the tokens before it."""
    config = ModelConfig(dtype="float32", quantization="none")
    model = load_model(config, folder, torch.device("cpu"))
    core = make_core(model, num_blocks=30, max_num_batched_tokens=512, preemption="recompute")
    answers = answers_of(core, [tuple(prompt) for prompt in prompts])
    assert "preemptions" not in core.counters()
    reference = transformers_model(folder)
    for prompt, answer in answers.items():
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *answer]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
        assert len(answer) == NUM_NEW_TOKENS
    return Subject(model, answers)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Subject:
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 290, (length,), generator=generator).tolist() for length in TINY_LENGTHS]
    return make_subject(folder, prompts)


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Subject:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return make_subject(smollm2, [tokenizer(text)["input_ids"] for text in TEXTS])


def make_core(model: LoadedModel, num_blocks: int = NUM_BLOCKS, **settings: Any) -> EngineCore:
    num_swap_blocks = 0 if settings["preemption"] == "recompute" else NUM_SWAP_BLOCKS
    config = SchedulerConfig(
        max_model_len=512,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks or None,
        block_size=BLOCK_SIZE,
        **settings,
    )
    pool = KVPool(num_blocks, model.kv_block_shape(BLOCK_SIZE), model.device)
    runner = make_runner(model, pool, HostBlocks(num_swap_blocks, pool))
    return EngineCore(
        Scheduler(config, KVConnectorScheduler(BLOCK_SIZE)),
        make_pipeline(runner, async_scheduling=config.async_scheduling),
        FakeBlockMover(),
        make_grammars(),
        (),
        SystemClock(),
    )


def answers_of(core: EngineCore, prompts: list[tuple[int, ...]]) -> Answers:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS)
    for number, prompt in enumerate(prompts):
        request = EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params)
        core.add_request(request, "test")
    answers: Answers = {prompt: [] for prompt in prompts}
    core.may_progress = True
    while core.may_progress:
        for output in core.step().get("test", []):
            answer = answers[prompts[int(output.request_id)]]
            assert output.first_position == len(answer)
            answer += output.token_ids
    core.close()
    return answers


def check(subject: Subject, **settings: Any) -> None:
    core = make_core(subject.model, **settings)
    assert answers_of(core, list(subject.expected)) == subject.expected
    counters = core.counters()
    if settings["max_num_batched_tokens"] > 1:  # a budget of one serves one request at a time
        assert counters["preemptions"] > 0
        if "batching" not in settings:
            assert (counters.get("swapped_in_blocks", 0) > 0) == (settings["preemption"] != "recompute")
    blocks = core.scheduler.kv_block_counts()
    assert (blocks.free, blocks.host_used) == (blocks.total, 0)


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("preemption", PREEMPTIONS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_chunked_prefill_preemption_and_planning_ahead_change_no_token(
    tiny: Subject, budget: int, preemption: str, async_scheduling: bool
) -> None:
    check(tiny, max_num_batched_tokens=budget, preemption=preemption, async_scheduling=async_scheduling)


TWO_PHASE = {"batching": "prefill_first", "max_num_batched_tokens": 128, "enable_prefix_caching": False}


MIXED = TWO_PHASE | {"batching": "mixed"}


@pytest.mark.parametrize("preemption", PREEMPTIONS)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("classical", [TWO_PHASE, MIXED], ids=["two-phase", "mixed"])
def test_classical_schedulers_give_the_same_tokens(
    tiny: Subject, classical: dict[str, Any], policy: str, preemption: str
) -> None:
    check(tiny, **classical, preemption=preemption, policy=policy)


@pytest.mark.parametrize("rules", ["nano_vllm", "mini_vllm"])
@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
def test_c59_requests_that_run_without_a_place_in_every_step_get_the_same_tokens(
    tiny: Subject, async_scheduling: bool, rules: str
) -> None:
    """Eight blocks are enough for any two of these requests. So a preemption shows that more than two run."""
    check(
        tiny,
        **TWO_PHASE,
        num_blocks=9,
        max_num_seqs=2,
        preemption="recompute",
        prefill_first_rules=rules,
        async_scheduling=async_scheduling,
    )


@pytest.mark.by_hand  # the tiny model is served with these settings, too
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 33, "preemption": "recompute", "async_scheduling": False},
        {"max_num_batched_tokens": 512, "preemption": "swap"},
        {**TWO_PHASE, "preemption": "swap", "policy": "priority"},
    ],
    ids=["33-sync", "512-swap", "two-phase-swap"],
)
def test_the_real_model_gives_the_same_tokens_too(real: Subject, settings: dict[str, Any]) -> None:
    check(real, **settings)
