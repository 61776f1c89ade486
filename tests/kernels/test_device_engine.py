"""The whole engine as it runs on a GPU gives the tokens of the engine on a CPU.

Without a GPU the kernels are interpreted; steps that would be recorded as graphs are done anew each time. The rest is
as on a GPU: staging, padding, tokens that only the device knows, steps launched before their predecessors end.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.clock import SystemClock
from baton.config import ModelConfig, SchedulerConfig
from baton.kv_groups import ONE_GROUP, KVGroups
from baton.request import EngineRequest
from baton.sampling import SamplingParams
from engine.batch import SampledRequest, StepLimits
from engine.capacity import largest_steps
from engine.drafts import Drafter, NGramProposer
from engine.gpu.device_parts import make_device_parts
from engine.gpu.device_sampler import DeviceSampledTokens, DeviceSampler
from engine.gpu.graphs import CudaGraphs, Repeater
from engine.kernels.switches import ALL_OFF, KernelSwitches, switched
from engine.kv_cache import KVPool
from engine.layers.triton_backend import TritonBackend
from engine.loading.loader import LoadedModel, load_model
from engine.pipeline import Pipeline, StreamPipeline, make_pipeline
from engine.request_table import IntArray
from engine.runner_parts import make_runner
from scheduler import Scheduler
from tests.factories.engine import FakeBlockMover, make_grammars
from tests.factories.models import WINDOWED, make_model_dir
from tests.kernels.device_parts import OF_PADDED_ROWS, SMALL, make_parts
from worker.core import EngineCore
from worker.kv_connector_scheduler import KVConnectorScheduler

pytestmark = OF_PADDED_ROWS

CPU = torch.device("cpu")
NUM_TOKENS = 4
VOCAB = SMALL["vocab_size"]
PROMPTS = [[(7 * i + length) % VOCAB for i in range(length)] for length in (1, 5, 11)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=2, prompt_logprobs=0),
    SamplingParams(temperature=0.9, top_k=30, top_p=0.9, seed=5, max_tokens=NUM_TOKENS, prompt_logprobs=3),
    SamplingParams(
        temperature=0.7,
        seed=6,
        repetition_penalty=1.3,
        min_tokens=NUM_TOKENS,
        max_tokens=NUM_TOKENS,
        prompt_logprobs=1,
    ),
]
IN_GROUPS = WINDOWED | {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
"""One KV group has full attention, two have windows."""
FLOAT32 = ModelConfig(dtype="float32")

Answers = dict[str, tuple[list[int], list[Any]]]


def make_config(block_size: int, num_blocks: int, **settings: Any) -> SchedulerConfig:
    steps = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    return SchedulerConfig(**steps | settings, num_blocks=num_blocks, block_size=block_size)


def answers_of(
    pipeline: Pipeline,
    config: SchedulerConfig,
    given: Answers | None = None,
    num_drafts: int = 0,
    kv_groups: KVGroups = ONE_GROUP,
    prompts: Sequence[list[int]] = PROMPTS,
) -> Answers:
    """`given`: output that every request has at its start, as a part of the answer."""
    core = EngineCore(
        Scheduler(
            config,
            KVConnectorScheduler(config.block_size, kv_groups),
            num_speculative_tokens=num_drafts,
            kv_groups=kv_groups,
        ),
        pipeline,
        FakeBlockMover(),
        make_grammars(),
        (),
        SystemClock(),
    )
    answers: Answers = {}
    for number, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True)):
        outputs, logprobs = given[str(number)] if given else ([], [])
        answers[str(number)] = ([*outputs], [*logprobs])
        request = EngineRequest(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            sampling_params=params,
            output_token_ids=tuple(outputs),
        )
        core.add_request(request, "test")
    core.may_progress = True
    while core.may_progress:
        for output in core.step().get("test", []):
            token_ids, logprobs = answers[output.request_id]
            assert output.first_position == len(token_ids)
            token_ids += output.token_ids
            logprobs += (*(output.prompt_logprobs or ()), *(output.logprobs or ()))
    counters = core.counters()
    if "preemption" in config.model_fields_set:
        assert counters.get("preemptions", 0) > 0
    if num_drafts:
        num_accepted = counters["spec_decode_num_accepted_tokens"]
        assert 0 < num_accepted < counters["spec_decode_num_draft_tokens"]
    core.close()
    return answers


def on_cpu(path: Path, config: SchedulerConfig, prompts: Sequence[list[int]] = PROMPTS) -> Answers:
    model = load_model(FLOAT32, path, CPU)
    pool = KVPool(64, model.kv_block_shape(config.block_size), CPU)
    roomy = make_config(config.block_size, 64, max_model_len=config.max_model_len)
    pipeline = make_pipeline(make_runner(model, pool), async_scheduling=False)
    return answers_of(pipeline, roomy, kv_groups=model.layer_groups.groups, prompts=prompts)


def on_device(
    path: Path,
    device: torch.device,
    config: SchedulerConfig,
    *,
    uses_graphs: bool,
    given: Answers | None = None,
    prompts: Sequence[list[int]] = PROMPTS,
) -> Answers:
    model: LoadedModel = load_model(FLOAT32, path, device, TritonBackend())
    assert config.num_blocks is not None
    assert config.max_model_len is not None
    pool = KVPool(config.num_blocks, model.kv_block_shape(config.block_size), device)
    limits = StepLimits(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len)
    parts = make_device_parts(model, pool, limits, num_multiprocessors=2)
    if uses_graphs:
        parts.record(CudaGraphs() if device.type == "cuda" else Repeater())
    pool.blocks_NLKHTD[1:] = math.nan  # a former owner may have left such bytes
    runner = parts.runner(pool, config.num_swap_blocks or 0)
    pipeline = StreamPipeline(runner, is_async=config.async_scheduling)
    return answers_of(pipeline, config, given, kv_groups=parts.forward.groups, prompts=prompts)


class HalfRight(NGramProposer):
    """Guesses from the answers; every other guess is wrong from its third token on."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(2, 4)
        self._wholes = [[*prompt, *answers[str(i)][0]] for i, prompt in enumerate(PROMPTS)]
        self._num_asked = 0

    def propose(self, token_ids: IntArray, num_tokens: int) -> list[int]:
        self._num_asked += 1
        known = token_ids.tolist()
        # A step may sample beyond the end, which only the scheduler knows.
        (whole,) = [whole for whole in self._wholes if whole[: len(known)] == known[: len(whole)]]
        guess = whole[len(known) :][:num_tokens]
        return guess if self._num_asked % 2 else [*guess[:1], *[(each + 1) % VOCAB for each in guess[1:]]]


def with_drafts(
    path: Path, device: torch.device, config: SchedulerConfig, expected: Answers, *, uses_graphs: bool
) -> Answers:
    """The answers of the device. A step has one sequence for each token and each draft."""
    num_drafts = 3
    model = load_model(FLOAT32, path, device, TritonBackend())
    assert config.num_blocks is not None
    limits = largest_steps(config, model, num_drafts)
    pool = KVPool(config.num_blocks, model.kv_block_shape(config.block_size), device)
    parts = make_device_parts(model, pool, limits, num_multiprocessors=2)
    if uses_graphs:
        parts.record(CudaGraphs() if device.type == "cuda" else Repeater())
    drafter = Drafter(HalfRight(expected), num_drafts, 32, num_equal_rows=200.0)
    runner = parts.runner(pool, config.num_swap_blocks or 0, drafter=drafter)
    pipeline = StreamPipeline(runner, is_async=config.async_scheduling)
    return answers_of(pipeline, config, num_drafts=num_drafts, kv_groups=parts.forward.groups)


def assert_same(device: Answers, cpu: Answers) -> None:
    for request_id, (token_ids, logprobs) in cpu.items():
        assert device[request_id][0] == token_ids, request_id
        for ours, theirs in zip(device[request_id][1], logprobs, strict=True):
            assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            for (our_id, our_logprob), (their_id, their_logprob) in zip(ours.top, theirs.top, strict=True):
                assert our_logprob == pytest.approx(their_logprob, abs=1e-4)
                assert our_id == their_id or is_tied(their_logprob, theirs.top)


def is_tied(logprob: float, top: Sequence[tuple[int, float]]) -> bool:
    """Whether another log-probability is nearly equal. A device sums in another order, so it may have the other one in
    this place."""
    return sum(abs(logprob - other) < 1e-5 for _, other in top) > 1


@pytest.mark.parametrize(
    ("architecture", "overrides", "block_size", "uses_graphs"),
    [
        ("llama", {"num_hidden_layers": 2, "vocab_size": 300}, 32, True),
        # biases are also computed with and without fusions, windows also with KV groups
        pytest.param(
            "llama", {"attention_bias": True, "mlp_bias": True}, 16, False, marks=pytest.mark.by_hand
        ),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}, 32, True),
        pytest.param("mistral", {"sliding_window": 7}, 16, True, marks=pytest.mark.by_hand),
    ],
    ids=str,
)
def test_the_same_tokens_as_on_a_cpu(
    tmp_path: Path,
    device: torch.device,
    architecture: str,
    overrides: dict[str, Any],
    block_size: int,
    uses_graphs: bool,
) -> None:
    path = make_model_dir(tmp_path / "model", architecture, **(SMALL | overrides))
    config = make_config(block_size, 16)
    assert_same(on_device(path, device, config, uses_graphs=uses_graphs), on_cpu(path, config))


@pytest.mark.parametrize(
    "overrides",
    [pytest.param({}, marks=pytest.mark.by_hand), {"attention_bias": True, "mlp_bias": True}],
    ids=["without biases", "with biases"],
)
@pytest.mark.parametrize("switches", [KernelSwitches(), ALL_OFF], ids=["all fused", "nothing fused"])
def test_the_same_tokens_with_and_without_fusions(
    tmp_path: Path, device: torch.device, switches: KernelSwitches, overrides: dict[str, Any]
) -> None:
    path = make_model_dir(tmp_path / "model", **(SMALL | overrides))
    config = make_config(16, 16)
    with switched(switches):
        assert_same(on_device(path, device, config, uses_graphs=True), on_cpu(path, config))


@pytest.mark.parametrize("block_size", [pytest.param(8, marks=pytest.mark.by_hand), 32])
def test_c27_kv_groups_change_no_token(tmp_path: Path, device: torch.device, block_size: int) -> None:
    """Windows begin several tiles of keys after the beginning of their contexts, and each chunk of a prompt gives
    blocks back. Blocks of 32 tokens are read by the copy engine."""
    path = make_model_dir(tmp_path / "model", "qwen2", **(SMALL | IN_GROUPS))
    lengths, settings = (5, 40, 105), {"max_model_len": 112, "max_num_batched_tokens": 48}
    prompts = [[(7 * i + length) % VOCAB for i in range(length)] for length in lengths]
    config = make_config(block_size, 3 * 192 // block_size, **settings)
    uses_graphs = block_size == 8 or device.type == "cuda"  # interpreted, padded steps take twice the time
    found = on_device(path, device, config, uses_graphs=uses_graphs, prompts=prompts)
    assert_same(found, on_cpu(path, config, prompts))


@pytest.mark.parametrize(
    ("preemption", "num_groups"),
    [
        ("swap", 1),
        ("recompute", 3),
        pytest.param("recompute", 1, marks=pytest.mark.by_hand),
        pytest.param("swap", 3, marks=pytest.mark.by_hand),
    ],
)
def test_preemption_changes_no_token(
    tmp_path: Path, device: torch.device, preemption: str, num_groups: int
) -> None:
    """There are blocks for one and a half requests."""
    groups = {"architecture": "qwen2", **IN_GROUPS, "sliding_window": 6} if num_groups > 1 else {}
    path = make_model_dir(tmp_path / "model", **(SMALL | groups))
    swap = {"num_swap_blocks": 8 * num_groups} if preemption == "swap" else {}
    config = make_config(4, 5 * num_groups + 1, preemption=preemption, **swap)
    uses_graphs = num_groups == 1 or device.type == "cuda"  # interpreted, they take twice the time
    assert_same(on_device(path, device, config, uses_graphs=uses_graphs), on_cpu(path, config))


def test_synchronous_steps_change_no_token(tmp_path: Path, device: torch.device) -> None:
    path = make_model_dir(tmp_path / "model", **SMALL)
    config = make_config(16, 16, async_scheduling=False)
    assert_same(on_device(path, device, config, uses_graphs=True), on_cpu(path, config))


@pytest.mark.parametrize(
    ("overrides", "block_size", "uses_graphs", "settings"),
    [
        ({}, 16, True, {}),
        ({"architecture": "mistral", "sliding_window": 7}, 16, False, {}),
        (
            {},
            4,
            False,
            {"num_blocks": 5, "preemption": "swap", "num_swap_blocks": 8, "async_scheduling": False},
        ),
    ],
    ids=["graphs", "window", "swap, in turn"],
)
def test_c62_drafts_change_no_token_on_a_device(
    tmp_path: Path,
    device: torch.device,
    overrides: dict[str, Any],
    block_size: int,
    uses_graphs: bool,
    settings: dict[str, Any],
) -> None:
    path = make_model_dir(tmp_path / "model", **(SMALL | overrides))
    config = make_config(block_size, **({"num_blocks": 16} | settings))
    expected = on_cpu(path, config)
    assert_same(with_drafts(path, device, config, expected, uses_graphs=uses_graphs), expected)


@pytest.mark.parametrize(
    "settings", [{"batching": "prefill_first", "max_num_seqs": 1}, {"batching": "mixed"}], ids=str
)
def test_c59_classical_schedulers_change_no_token(
    tmp_path: Path, device: torch.device, settings: dict[str, Any]
) -> None:
    """With `prefill_first`, three requests run, but a step decodes one of them, and the engine's buffers and
    graphs are for one."""
    path = make_model_dir(tmp_path / "model", **SMALL)
    config = make_config(16, 16, max_num_batched_tokens=20, **settings)
    assert_same(on_device(path, device, config, uses_graphs=True), on_cpu(path, config))


def test_c52_a_request_that_moves_with_half_its_answer_keeps_its_tokens(
    tmp_path: Path, device: torch.device
) -> None:
    path = make_model_dir(tmp_path / "model", **SMALL)
    config = make_config(16, 16)
    whole = on_cpu(path, config)
    half = {
        name: (tokens[:2], logprobs[:-2] if PARAMS[int(name)].logprobs is not None else logprobs)
        for name, (tokens, logprobs) in whole.items()
    }
    assert_same(on_device(path, device, config, uses_graphs=True, given=half), whole)


def test_a_rehearsal_samples_as_many_rows_as_a_step_of_decodes_has(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if a step has room for only one token of each request."""
    num_rows: list[int] = []
    sample = DeviceSampler.__call__

    def noting(
        self: DeviceSampler, logits_RV: torch.Tensor | None, requests: Sequence[SampledRequest]
    ) -> DeviceSampledTokens:
        num_rows.append(len(requests))
        return sample(self, logits_RV, requests)

    monkeypatch.setattr(DeviceSampler, "__call__", noting)
    _, parts, _ = make_parts(tmp_path, device, StepLimits(8, 8, 32))
    parts.rehearse()
    assert max(num_rows) == 8


def test_a_rehearsal_leaves_nothing_behind(tmp_path: Path, device: torch.device) -> None:
    _, parts, pool = make_parts(tmp_path, device, StepLimits(2, 8, 32))
    parts.rehearse()
    assert not pool.blocks_NLKHTD.any()
