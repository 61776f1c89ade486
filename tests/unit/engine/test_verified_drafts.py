"""Drafts are verified by sampling: a step with drafts samples what steps without them would, one after another."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.config import ModelConfig
from baton.sampling import SamplingParams
from baton.step import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from engine.acceptance import MAX_STEPS_WITHOUT
from engine.batch import RequestBatch, RunnerRequest, SampledRequest, StepBatch
from engine.drafts import Drafter, NGramProposer
from engine.kv_cache import HostBlocks, KVPool
from engine.loading.loader import LoadedModel, load_model
from engine.native.library import native_library
from engine.runner import LaunchedStep, ModelRunner
from engine.sampler import KnownTokens, SampledToken
from engine.step_logits import StepLogits
from tests.factories.stepping import StepDriver, make_request_data

CPU = torch.device("cpu")
FLOAT32 = ModelConfig(dtype="float32")
NUM_TOKENS = 24
PROMPTS = {f"r{length}": [(7 * i + length) % 300 for i in range(length)] for length in (2, 4, 9, 30)}
PARAMS = {
    "r2": SamplingParams(temperature=0.0, max_tokens=100),
    "r4": SamplingParams(temperature=1.0, seed=3, max_tokens=100, logprobs=2),
    "r9": SamplingParams(
        temperature=0.8, seed=5, max_tokens=100, repetition_penalty=1.2, frequency_penalty=0.3
    ),
    "r30": SamplingParams(temperature=0.0, max_tokens=100, min_tokens=12, logit_bias={4: 3.0}),
}
STOP_TOKENS = tuple(range(100, 200))
"""Many, so that `min_tokens` matters. The driver does not stop at them."""


@pytest.fixture(scope="module", params=["native", "torch"])
def model(folder: Path, request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    if request.param == "native" and native_library() is None:
        pytest.skip("needs a compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr("engine.loading.loader.native_library", lambda: None)
        yield load_model(FLOAT32, folder, CPU)


def begin(model: LoadedModel, names: Sequence[str]) -> StepDriver:
    driver = StepDriver(model)
    for name in names:
        stop_token_ids = STOP_TOKENS if PARAMS[name].min_tokens else ()
        driver.add(name, PROMPTS[name], PARAMS[name], stop_token_ids)
    driver.step({name: len(PROMPTS[name]) for name in names})
    return driver


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> dict[str, list[int]]:
    """Each request by itself, token by token."""
    answers = {}
    for name in PROMPTS:
        driver = begin(model, [name])
        for _ in range(NUM_TOKENS + 8):
            driver.step({name: 1})
        answers[name] = driver.requests[name].outputs
    return answers


def guess(right: Sequence[int], rng: random.Random) -> tuple[int, ...]:
    """Some drafts; from a place on they are wrong."""
    drafts = list(right[: rng.randrange(6)])
    if drafts and rng.random() < 0.7:
        place = rng.randrange(len(drafts))
        drafts[place] = (drafts[place] + 1 + rng.randrange(200)) % 300
    return tuple(drafts)


@pytest.mark.parametrize("seed", range(4))
def test_c62_right_and_wrong_drafts_change_no_token(
    model: LoadedModel, alone: dict[str, list[int]], seed: int
) -> None:
    rng, driver = random.Random(seed), begin(model, list(PROMPTS))
    num_at_once = set()
    while lacking := [r for r in driver.requests.values() if len(r.outputs) < NUM_TOKENS]:
        drafts = {r.request_id: guess(alone[r.request_id][len(r.outputs) :], rng) for r in lacking}
        output = driver.step(dict.fromkeys(drafts, 1), {name: each for name, each in drafts.items() if each})
        for name, token_ids in output.sampled_token_ids.items():
            num_at_once.add((len(drafts[name]), len(token_ids)))
    for name, request in driver.requests.items():
        assert request.outputs == alone[name][: len(request.outputs)]
    assert any(sampled > 3 for _, sampled in num_at_once)
    assert any(sampled <= given for given, sampled in num_at_once), "a wrong draft"
    logprobs = driver.requests["r4"].logprobs
    assert [each.token_id for each in logprobs] == driver.requests["r4"].outputs


def test_a_request_that_ended_while_its_step_was_under_way_gets_no_drafts(model: LoadedModel) -> None:
    """A device's next step is launched before this one is waited for."""
    driver = StepDriver(model, drafter=lambda _: Drafter(NGramProposer(1, 4), 3, 32, num_equal_rows=1e6))
    for name in ("stays", "ends"):
        driver.add(name, [5, 6, 7] * 4, SamplingParams(temperature=0.0, max_tokens=100, logit_bias={5: 99.0}))
    driver.step({"stays": 12, "ends": 12})
    step = driver.runner.launch(driver.plan({"stays": 1, "ends": 1}))
    driver.finish("ends")
    driver.runner.launch(driver.plan({}))
    output = step.wait()
    assert output.sampled_token_ids == {"stays": [5], "ends": [5]}
    assert output.draft_token_ids.keys() == {"stays"}


def test_a_first_token_with_forced_tokens_behind_it_is_known_to_the_drafter(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request gets no draft, and the drafts of others must not delay the token."""
    asked: list[tuple[list[str], bool]] = []

    class Asked(Drafter):
        def draft(
            self, requests: Sequence[RunnerRequest], batch: RequestBatch, *, any_first_token: bool
        ) -> Iterator[tuple[RunnerRequest, list[int]]]:
            asked.append(([each.request_id for each in requests], any_first_token))
            return super().draft(requests, batch, any_first_token=any_first_token)

    monkeypatch.setattr(
        LaunchedStep, "_forced", lambda _, names: {"new": (5,)}.items() if "new" in names else ()
    )
    driver = StepDriver(model, drafter=lambda _: Asked(NGramProposer(1, 4), 3, 32, num_equal_rows=1e6))
    driver.runner._takes_forced = True
    driver.add("old", [5, 6, 7] * 4)
    driver.step({"old": 12})
    driver.step({"old": 1})
    driver.add("new", [5, 6, 7] * 4)
    driver.step({"old": 1, "new": 12})
    assert asked == [(["old"], True), (["old"], False), (["old"], True)]


def test_a_preempted_request_forgets_what_its_drafts_left(
    model: LoadedModel, alone: dict[str, list[int]]
) -> None:
    name = "r9"
    driver = begin(model, [name])
    wrong = (alone[name][1], 0, 0, 0)
    driver.step({name: 1}, {name: wrong})
    driver.preempt(name)
    while len(driver.requests[name].outputs) < NUM_TOKENS:
        request = driver.requests[name]
        driver.step({name: min(4, request.num_tokens - request.num_computed)})
    assert driver.requests[name].outputs == alone[name][: len(driver.requests[name].outputs)]


class ScriptedSampler:
    """Samples these rows, whatever the logits."""

    def __init__(self) -> None:
        self.rows: list[SampledToken] = []

    def __call__(self, logits_RV: torch.Tensor | None, requests: Sequence[SampledRequest]) -> KnownTokens:
        assert len(requests) == len(self.rows)
        return KnownTokens(self.rows)


def no_logits(batch: StepBatch) -> StepLogits:
    return StepLogits(torch.zeros(len(batch.sampling_rows_R), 1))


def sampled_after_drafts(
    model: LoadedModel, drafts: tuple[int, ...], rows: list[SampledToken], drafter: Drafter | None = None
) -> ModelRunnerOutput:
    """The outcome of a step in which the rows of a request with the stop token 9 sample this."""
    sampler = ScriptedSampler()
    pool = KVPool(4, model.kv_block_shape(16), CPU)
    runner = ModelRunner(no_logits, sampler, HostBlocks(0, pool), 16, drafter=drafter)
    sampler.rows = rows
    return runner.execute(first_plan(drafts))


def first_plan(drafts: tuple[int, ...]) -> SchedulerOutput:
    """The last of five known tokens, with drafts."""
    new = make_request_data([5, 6, 7, 8, 5], stop_token_ids=[9], num_computed_tokens=4)
    return SchedulerOutput(
        scheduled_new_reqs=(new,),
        scheduled_cached_reqs=CachedRequestData(),
        num_scheduled_tokens={"r": 1 + len(drafts)},
        total_num_scheduled_tokens=1 + len(drafts),
        preempted_req_ids=frozenset(),
        finished_req_ids=frozenset(),
        scheduled_spec_decode_tokens={"r": drafts} if drafts else {},
    )


def rows(*token_ids: int, wrong: Sequence[int] = ()) -> list[SampledToken]:
    """`wrong`: the rows whose logits are not finite."""
    return [SampledToken(token_id, None, row not in wrong) for row, token_id in enumerate(token_ids)]


@pytest.mark.parametrize(
    ("drafts", "sampled", "taken"),
    [
        ((1, 2), (1, 2, 3), [1, 2, 3]),
        ((1, 2), (1, 4, 3), [1, 4]),
        ((1, 2), (4, 2, 3), [4]),
        ((1, 1, 1), (1, 1, 1, 1), [1, 1, 1, 1]),
        ((9, 2), (9, 2, 3), [9]),
        ((1, 9, 2), (1, 9, 2, 3), [1, 9]),
    ],
)
def test_tokens_count_up_to_the_first_wrong_draft_or_the_end_of_the_request(
    model: LoadedModel, drafts: tuple[int, ...], sampled: tuple[int, ...], taken: list[int]
) -> None:
    assert sampled_after_drafts(model, drafts, rows(*sampled)).sampled_token_ids == {"r": taken}


def test_logits_behind_a_wrong_draft_may_be_anything(model: LoadedModel) -> None:
    output = sampled_after_drafts(model, (1, 2), rows(1, 7, 0, wrong=[2]))
    assert (output.sampled_token_ids, output.non_finite) == ({"r": [1, 7]}, set())
    output = sampled_after_drafts(model, (1, 2), rows(1, 7, 0, wrong=[1]))
    assert (output.sampled_token_ids, output.non_finite) == ({}, {"r"})


def test_what_follows_the_taken_tokens_is_guessed_up_to_the_end_of_the_request(model: LoadedModel) -> None:
    drafter = Drafter(NGramProposer(2, 4), 4, max_num_batched_tokens=64, num_equal_rows=12.0)
    output = sampled_after_drafts(model, (6, 7), rows(6, 7, 0), drafter)
    assert output.draft_token_ids == {}, "nothing like it occurred before"
    assert output.unforeseeable == {"r"}, "the next guess may be right"
    output = sampled_after_drafts(model, (6, 3), rows(6, 7, 0), drafter)
    assert output.sampled_token_ids == {"r": [6, 7]}
    assert output.draft_token_ids == {"r": (8, 5)}, "a wrong draft before, so fewer now"
    output = sampled_after_drafts(model, (6, 9), rows(6, 7, 0), drafter)
    assert output.draft_token_ids == {"r": (8, 5)}


def test_c11_a_request_for_which_drafts_do_not_pay_may_be_planned_ahead(model: LoadedModel) -> None:
    dear = Drafter(NGramProposer(2, 4), 4, max_num_batched_tokens=64, num_equal_rows=0.01)
    output = sampled_after_drafts(model, (), rows(6), dear)
    assert (output.draft_token_ids, output.unforeseeable) == ({}, set())
    for drafter in (None, Drafter(NGramProposer(2, 4), 4, max_num_batched_tokens=2, num_equal_rows=12.0)):
        output = sampled_after_drafts(model, (), rows(6), drafter)
        assert (output.draft_token_ids, output.unforeseeable) == ({}, set()), "there is no room for drafts"


def test_c11_a_request_without_drafts_for_some_steps_may_be_planned_ahead_until_one_is_found(
    model: LoadedModel,
) -> None:
    sampler, pool = ScriptedSampler(), KVPool(4, model.kv_block_shape(64), CPU)
    drafter = Drafter(NGramProposer(2, 4), 4, max_num_batched_tokens=64, num_equal_rows=12.0)
    runner = ModelRunner(no_logits, sampler, HostBlocks(0, pool), 64, drafter=drafter)
    outputs = []
    for plan, token_id in zip(steps_of_one_token(), [*range(20, 30), 21, 22, 40, 41], strict=False):
        sampler.rows = rows(token_id)
        outputs.append(runner.execute(plan))
    is_named = [bool(output.unforeseeable) for output in outputs]
    # The first step samples a first token, after which there may be no guess.
    assert is_named == [True] * (1 + MAX_STEPS_WITHOUT) + [False] * 2 + [True] * 3
    assert [bool(output.draft_token_ids) for output in outputs] == [False] * 11 + [True] + [False] * 2


def steps_of_one_token() -> Iterator[SchedulerOutput]:
    """Steps of the tokens that follow [5, 6, 7, 8, 5], one by one."""
    yield first_plan(())
    for num_computed in itertools.count(5):
        cached = CachedRequestData(("r",), ((),), (num_computed,))
        yield replace(first_plan(()), scheduled_new_reqs=(), scheduled_cached_reqs=cached)


def two_steps(drafts: tuple[int, ...], num_taken: int) -> Iterator[SchedulerOutput]:
    """A step that computes the last token of [5, 6, 7, 8, 5] and its drafts, and the step after it."""
    yield first_plan(drafts)
    cached = CachedRequestData(("r",), ((),), (4 + num_taken,))
    yield replace(
        first_plan(()), scheduled_new_reqs=(), scheduled_cached_reqs=cached, num_scheduled_tokens={"r": 1}
    )


def test_c62_a_rank_that_does_not_sample_computes_a_step_with_drafts_before_it_begins_the_next(
    model: LoadedModel,
) -> None:
    sampler, batches = ScriptedSampler(), list[StepBatch]()

    def forward(batch: StepBatch) -> StepLogits:
        batches.append(batch)
        return no_logits(batch)

    pool = KVPool(4, model.kv_block_shape(16), CPU)
    runner = ModelRunner(forward, sampler, HostBlocks(0, pool), 16, samples=False)
    for plan, sampler.rows in zip(two_steps((1, 2), 2), (rows(1, 4, 3), rows(9)), strict=True):
        runner.launch(plan)
    assert (batches[1].positions_T.tolist(), batches[1].input_ids_T.tolist()) == ([6], [4])


def test_drafts_of_a_request_whose_next_step_is_under_way_are_guessed_from_its_known_tokens(
    model: LoadedModel,
) -> None:
    """The scheduler drops these drafts. But they show the scheduler that the step after the next may have drafts."""
    sampler, pool = ScriptedSampler(), KVPool(4, model.kv_block_shape(16), CPU)
    drafter = Drafter(NGramProposer(2, 4), 4, max_num_batched_tokens=64, num_equal_rows=12.0)
    runner = ModelRunner(no_logits, sampler, HostBlocks(0, pool), 16, drafter=drafter)
    steps = []
    for plan, sampler.rows in zip(two_steps((), 1), (rows(6), rows(7)), strict=True):
        steps.append(runner.launch(plan))
    first, second = (step.wait() for step in steps)
    assert (first.draft_token_ids["r"][:3], first.unforeseeable) == ((7, 8, 5), {"r"})
    assert second.draft_token_ids["r"][:3] == (8, 5, 6)
