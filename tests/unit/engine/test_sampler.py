"""Sampling against plain references, one filter at a time and all of them together."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from engine.batch import RunnerRequest
from engine.grammars.compiler import Matcher
from engine.sampler import arg_max, sample
from tests.factories.stepping import make_request_data

VOCAB = 50


def request(prompt: tuple[int, ...] = (1,), outputs: tuple[int, ...] = (), **params: Any) -> RunnerRequest:
    stop_token_ids = params.pop("eos", ())
    params.setdefault("max_tokens", 10_000)
    return RunnerRequest(
        make_request_data(prompt, outputs, SamplingParams(**params), stop_token_ids=stop_token_ids)
    )


def random_logits(seed: int = 0, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return 2.0 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def token_ids(logits: torch.Tensor, *requests: RunnerRequest) -> list[int]:
    return [token.token_id for token in sample(logits, requests)]


def draws(logits: torch.Tensor, count: int, **params: Any) -> Counter[int]:
    """Tokens of `count` rows with the same logits and different seeds."""
    rows = [request(seed=seed, **params) for seed in range(count)]
    return Counter(token_ids(logits.expand(count, -1), *rows))


def test_greedy_takes_the_arg_max_whatever_the_filters() -> None:
    logits = random_logits(rows=3)
    rows = [request(temperature=0.0, top_k=5, top_p=0.1, min_p=0.5, seed=seed) for seed in range(3)]
    assert token_ids(logits, *rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [1, 50, 256, 1000, 1024, 49152])
def test_the_arg_max_is_the_first_largest_value(vocab: int) -> None:
    logits = torch.randint(0, 40, (9, vocab), generator=torch.Generator().manual_seed(1)).float()
    logits[1] = -math.inf
    logits[2, vocab // 2] = math.nan
    logits[3, vocab // 2 :] = math.inf
    assert torch.equal(arg_max(logits), logits.argmax(-1))
    assert arg_max(logits[:0]).tolist() == []


def test_plain_sampling_follows_the_distribution() -> None:
    logits, count = random_logits(vocab=12), 5_000
    expected = count * (logits / 0.7).softmax(-1)[0]
    seen = draws(logits, count, temperature=0.7)
    chi_square = sum((seen[i] - e) ** 2 / e for i, e in enumerate(expected.tolist()))
    assert chi_square < 31.3  # 11 degrees of freedom, p = 0.001


def test_positions_of_one_seed_follow_the_distribution_too() -> None:
    logits, count = random_logits(vocab=12), 2_000
    rows = [request(outputs=(0,) * position, seed=9) for position in range(count)]
    expected = count * logits.softmax(-1)[0]
    seen = Counter(token_ids(logits.expand(count, -1), *rows))
    assert sum((seen[i] - e) ** 2 / e for i, e in enumerate(expected.tolist())) < 31.3


def test_a_draw_is_a_function_of_seed_position_and_logits() -> None:
    logits = random_logits(vocab=1000)
    first = token_ids(logits, request(outputs=(5, 6), seed=3))
    assert token_ids(logits, request(prompt=(9, 9, 9), outputs=(7, 8), seed=3)) == first
    assert {token_ids(logits, request(outputs=(5,) * n, seed=3))[0] for n in range(20)} != set(first)
    assert {token_ids(logits, request(outputs=(5, 6), seed=n))[0] for n in range(20)} != set(first)


def test_no_seed_draws_like_seed_zero() -> None:
    logits = random_logits(vocab=1000)
    assert token_ids(logits, request()) == token_ids(logits, request(seed=0))


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = random_logits(rows=9, vocab=70_000)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 2, "top_k": 7},
        {"seed": 3, "top_p": 0.9},
        {"seed": 4, "top_k": 2000, "top_p": 0.8, "min_p": 0.001},
        {"seed": 5, "repetition_penalty": 1.3, "logprobs": 3},
        {"seed": 6, "min_p": 0.1, "temperature": 1.7},
        {"seed": 7, "top_p": 0.999, "temperature": 3.0},
        {"seed": 8, "logit_bias": {5: 3.0}, "presence_penalty": 1.0},
    ]
    rows = [request(**kind) for kind in kinds]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    backwards = sample(logits.flip(0), rows[::-1])
    assert together == backwards[::-1]


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": VOCAB + 1},
        {"top_p": 0.5},
        {"top_p": 1e-9},
        {"top_p": 0.9999},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 6, "top_p": 0.7},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.3, "temperature": 1.5},
        {"top_p": 0.8, "temperature": 0.4},
    ],
    ids=str,
)
def test_filters_leave_what_the_reference_leaves(params: dict[str, Any]) -> None:
    logits = random_logits(seed=4)
    kept = reference_kept(logits[0], **params)
    seen = draws(logits, 1000, **params)
    assert set(seen) <= kept
    probs = (logits[0] / params.get("temperature", 1.0)).softmax(-1)
    likely = {token for token in kept if probs[token] / probs[list(kept)].sum() > 0.01}
    assert likely <= set(seen)


def reference_kept(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> set[int]:
    """The documented order, one token at a time."""
    scores = (logits / temperature).tolist()
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    order = order[:top_k] if top_k else order
    weights = [math.exp(scores[token] - scores[order[0]]) for token in order]
    nucleus: list[int] = []
    mass = 0.0
    for token, weight in zip(order, weights, strict=True):
        if nucleus and mass >= top_p * sum(weights):
            break
        nucleus.append(token)
        mass += weight
    return {token for token in nucleus if math.exp(scores[token] - scores[order[0]]) >= min_p}


def test_a_nucleus_larger_than_the_first_candidates_is_found() -> None:
    """A flat row of 20,000: half of the mass needs 10,000 tokens, far more than are looked at first."""
    logits = -1e-4 * torch.arange(20_000.0).unsqueeze(0)
    seen = draws(logits, 150, top_p=0.5)
    kept = reference_kept(logits[0], top_p=0.5)
    assert set(seen) <= kept
    assert max(seen) > 0.9 * max(kept)


def test_equal_logits_all_stay() -> None:
    seen = draws(torch.zeros(1, 8), 2000, top_k=3, top_p=0.5, min_p=1.0)
    assert set(seen) == set(range(8))


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = random_logits()
    seen = draws(logits, 50, temperature=temperature)
    if temperature < 1.0:
        assert set(seen) == {int(logits.argmax())}
    else:
        assert len(seen) > 10


def test_logit_bias_forbids_and_forces() -> None:
    logits = random_logits()
    best = int(logits.argmax())
    assert best not in draws(logits, 500, logit_bias={best: -100.0})
    assert set(draws(logits, 100, logit_bias={7: 100.0})) == {7}
    assert token_ids(logits, request(temperature=0.0, logit_bias={best: -100.0})) != [best]


def test_token_ids_beyond_the_vocabulary_change_nothing() -> None:
    logits = random_logits()
    odd = request(temperature=0.0, logit_bias={VOCAB: 100.0}, min_tokens=5, eos=(VOCAB + 3,))
    assert token_ids(logits, odd) == [int(logits.argmax())]


def test_repetition_penalty_counts_prompt_and_output() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -0.9, 1.5]])
    seen = request(prompt=(0,), outputs=(1, 3), temperature=0.0, repetition_penalty=2.0)
    assert token_ids(logits, seen) == [4]
    below = torch.tensor([[-0.5, -0.6]])
    assert token_ids(below, request(prompt=(0,), temperature=0.0, repetition_penalty=2.0)) == [1]


def test_presence_and_frequency_penalties_count_output_only() -> None:
    logits = torch.tensor([[3.0, 2.5, 2.0]])
    in_prompt = request(prompt=(0, 0, 0), temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert token_ids(logits, in_prompt) == [0]
    present = request(outputs=(0, 0, 0), temperature=0.0, presence_penalty=0.4)
    assert token_ids(logits, present) == [0]  # once, however often it came
    frequent = request(outputs=(0, 0, 0), temperature=0.0, frequency_penalty=0.4)
    assert token_ids(logits, frequent) == [1]
    both = request(outputs=(0, 1), temperature=0.0, frequency_penalty=1.0, presence_penalty=0.6)
    assert token_ids(logits, both) == [2]


def test_bias_comes_before_penalties_and_the_stop_mask_after() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.0]])
    # Biased to 2.5 and 4, then token 1 is halved to 2. The other order would leave it at 0 / 2 + 4.
    penalized = request(prompt=(1,), temperature=0.0, logit_bias={1: 4.0, 0: 1.5}, repetition_penalty=2.0)
    assert token_ids(logits, penalized) == [0]
    masked = request(temperature=0.0, logit_bias={1: 100.0}, min_tokens=1, eos=(1,))
    assert token_ids(logits, masked) == [0]


def test_min_tokens_masks_stop_tokens_until_then() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    for outputs, expected in (((), 2), ((2,), 2), ((2, 2), 0)):
        row = request(outputs=outputs, temperature=0.0, min_tokens=2, eos=(0, 1))
        assert token_ids(logits, row) == [expected]
    assert not {0, 1} & set(draws(logits, 200, min_tokens=2, eos=(0, 1)))


def test_logprobs_come_from_the_raw_logits() -> None:
    logits = random_logits(rows=3)
    before = logits.clone()
    rows = [
        request(temperature=0.0, logprobs=4, logit_bias={7: 100.0}),
        request(temperature=0.0),
        request(seed=5, temperature=2.0, logprobs=0),
    ]
    tokens = sample(logits, rows)
    assert torch.equal(logits, before)
    expected = logits.log_softmax(-1)
    found = tokens[0].logprobs
    assert found is not None
    assert tokens[0].token_id == found.token_id == 7
    assert found.logprob == pytest.approx(expected[0, 7].item())
    order = expected[0].argsort(descending=True).tolist()
    assert found.rank == order.index(7) + 1
    assert [token for token, _ in found.top] == order[:4]
    assert [value for _, value in found.top] == pytest.approx(expected[0, order[:4]].tolist())
    assert tokens[1].logprobs is None
    assert tokens[2].logprobs is not None
    assert tokens[2].logprobs.top == ()


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = random_logits(rows=2).to(torch.bfloat16)
    rows = [request(temperature=0.0), request(seed=1)]
    assert token_ids(logits, *rows) == token_ids(logits.float(), *rows)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k, top_p": {"top_k": 5, "top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "min_tokens": {"temperature": 0.0, "min_tokens": 2, "eos": (4, 40)},
    "grammar": {"structured_output": StructuredOutput(GrammarKind.REGEX, "a")},
}


class AllowsFew:
    """A matcher that forbids nearly every token, or all of them."""

    def __init__(self, *token_ids: int) -> None:
        self._token_ids = token_ids

    def allowed(self, drafts: Sequence[int]) -> npt.NDArray[np.bool_]:
        assert not drafts
        return np.isin(np.arange(VOCAB), self._token_ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("value", "place"), [(math.nan, 0), (math.nan, 40), (math.inf, VOCAB - 1), (-math.inf, slice(None))]
)
def test_c55_a_row_that_is_not_finite_is_marked_and_no_other_changes(
    kind: str, value: float, place: int | slice
) -> None:
    """The row is marked even where a mask would hide the wrong value."""
    rows = [request(seed=seed, **KINDS[kind]) for seed in range(3)]
    if kind == "grammar":
        for row in rows:
            row.matcher = cast("Matcher", AllowsFew(3, 7))
    logits = random_logits(rows=3)
    logits[1, 5:] = -math.inf  # a model may rule tokens out
    before = sample(logits, rows)
    assert [token.is_finite for token in before] == [True] * 3
    logits[2, place] = value
    after = sample(logits, rows)
    assert [token.is_finite for token in after] == [True, True, False]
    assert after[:2] == before[:2]
    assert 0 <= after[2].token_id < VOCAB, "the next step may embed it before this one is known"


def test_c55_a_grammar_that_allows_nothing_is_not_the_models_fault() -> None:
    row = request(temperature=0.0)
    row.matcher = cast("Matcher", AllowsFew())
    assert sample(random_logits(), [row])[0].is_finite
