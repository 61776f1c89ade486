"""DeviceSampler gives the tokens of engine/sampler.sample, whatever its rows ask for."""

import math
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from engine.batch import DraftedRequest, RunnerRequest, SampledRequest
from engine.counter_rng import keys_at, row_keys, seed_states
from engine.gpu.device_sampler import DeviceSampler
from engine.gpu.logit_edits import list_edits
from engine.grammars.compiler import Matcher
from engine.sampler import sample
from tests.factories.stepping import make_request_data

VOCAB = 90


class AllowsSome:
    """A matcher that allows every third token. The number of tokens that were taken so far decides which third."""

    def __init__(self, num_taken: int) -> None:
        self._num_taken = num_taken

    def allowed(self, drafts: Sequence[int]) -> npt.NDArray[np.bool_]:
        remainder = (self._num_taken + len(drafts)) % 3
        return np.array([token_id % 3 == remainder for token_id in range(VOCAB)])

    def allowed_words(self, drafts: Sequence[int]) -> npt.NDArray[np.int32]:
        bits = np.packbits(self.allowed(drafts), bitorder="little")
        return np.pad(bits, (0, -len(bits) % 4)).view(np.int32)


def request(
    prompt: tuple[int, ...] = (1, 2, 2), outputs: tuple[int, ...] = (5, 6, 5), **params: Any
) -> RunnerRequest:
    params.setdefault("max_tokens", 1_000)
    state = RunnerRequest(
        make_request_data(prompt, outputs, SamplingParams(**params), stop_token_ids=(7, 8, 5_000))
    )
    if params.get("structured_output"):
        state.matcher = cast("Matcher", AllowsSome(len(outputs)))
    return state


def device_sampler(device: torch.device, max_num_rows: int = 8) -> DeviceSampler:
    """A sampler with several chunks and parts, although the vocabulary is small."""
    return DeviceSampler(VOCAB, max_num_rows, device, chunk=16, chunks_per_part=4)


def random_params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {
        "seed": rng.randrange(2**63),
        "temperature": rng.choice([0.0, 0.5, 0.8, 1.0, 1.7, 100.0, 1e-40]),
        "top_k": rng.choice([0, 0, 1, 4, 40, 1_000]),
        "top_p": rng.choice([1.0, 1.0, 0.95, 0.6, 0.1]),
        "min_p": rng.choice([0.0, 0.0, 0.05, 0.7]),
        "logprobs": rng.choice([None, 0, 3]),
    }
    if rng.random() < 0.5:
        params |= {
            "logit_bias": {t: rng.uniform(-5, 5) for t in rng.sample(range(VOCAB), 3)} | {VOCAB + 5: 9.0},
            "repetition_penalty": rng.choice([1.0, 1.3, 0.7]),
            "presence_penalty": rng.choice([0.0, 1.1]),
            "frequency_penalty": rng.choice([0.0, 0.3, -0.7]),
        }
        if rng.random() < 0.5:
            params["structured_output"] = StructuredOutput(GrammarKind.REGEX, "a")
        else:
            params["min_tokens"] = rng.choice([0, 3, 4])
    return params


@pytest.mark.parametrize("seed", range(6))
def test_equal_logits_give_equal_tokens(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    logits_RV = 3 * torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(seed))
    if seed % 2:
        logits_RV = logits_RV.to(torch.bfloat16)
    requests = [request(outputs=(5, 6, 5) * rng.randrange(3), **random_params(rng)) for _ in range(8)]
    sampler = device_sampler(device)
    found = sampler(logits_RV.to(device), requests).wait()
    expected = sample(logits_RV, requests)
    assert sampler.sampled_R.tolist() == [token.token_id for token in expected]
    for token, reference in zip(found, expected, strict=True):
        assert token.token_id == reference.token_id
        if reference.logprobs is None:
            assert token.logprobs is None
            continue
        assert token.logprobs is not None
        assert token.logprobs.token_id == reference.token_id
        assert token.logprobs.rank == reference.logprobs.rank
        assert math.isclose(token.logprobs.logprob, reference.logprobs.logprob, abs_tol=1e-5)
        assert [i for i, _ in token.logprobs.top] == [i for i, _ in reference.logprobs.top]
        assert dict(token.logprobs.top).get(token.token_id, token.logprobs.logprob) == token.logprobs.logprob
        for (_, value), (_, wanted) in zip(token.logprobs.top, reference.logprobs.top, strict=True):
            assert math.isclose(value, wanted, abs_tol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_c62_after_drafts_the_same_is_sampled_as_after_those_tokens(seed: int, device: torch.device) -> None:
    """The rows of a request with drafts are compared with the rows of requests that have these drafts as tokens."""
    rng, drafts = random.Random(seed), (6, 9, 6, 11)
    logits_RV = 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)).repeat(5, 1)
    for _ in range(6):
        params = random_params(rng)
        own = request(**params)
        rows: list[SampledRequest] = [own, *(DraftedRequest(own, drafts[: i + 1]) for i in range(4))]
        confirmed = [request(outputs=(5, 6, 5, *drafts[:i]), **params) for i in range(5)]
        expected = sample(logits_RV, confirmed)
        assert sample(logits_RV, rows) == expected
        found = device_sampler(device)(logits_RV.to(device), rows).wait()
        assert [token.token_id for token in found] == [token.token_id for token in expected]
        assert own.num_output_tokens == 3


def test_steps_of_one_batch_draw_anew_and_tokens_may_be_read_late(device: torch.device) -> None:
    """The first step's tokens are read after the second is drawn; then the batch changes."""
    logits_RV = torch.zeros(3, VOCAB)
    requests = [request(seed=seed) for seed in range(3)]
    sampler = device_sampler(device)
    expected, pending = [], []
    for _ in range(2):
        expected.append(sample(logits_RV, requests))
        pending.append(sampler(logits_RV.to(device), requests))
        for state in requests:
            state.append_token(0)
    assert [step.wait() for step in pending] == expected
    assert expected[0] != expected[1]
    assert sampler(logits_RV[1:].to(device), requests[1:]).wait() == sample(logits_RV[1:], requests[1:])


def test_min_tokens_ends_while_the_batch_stays(device: torch.device) -> None:
    logits_RV = torch.full((1, VOCAB), -math.inf)
    logits_RV[0, [7, 30]] = torch.tensor([9.0, 1.0])
    state = request(temperature=0.0, min_tokens=4)
    sampler = device_sampler(device)
    assert sampler(logits_RV.to(device), [state]).wait()[0].token_id == 30
    state.append_token(30)
    assert sampler(logits_RV.to(device), [state]).wait()[0].token_id == 7


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_c55_rows_that_are_not_finite_are_those_of_the_cpu(wrong: float, device: torch.device) -> None:
    """They lie in the first chunk and in the last, with every kind of sampling, and with a grammar that
    forbids the wrong token."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2 if math.isnan(wrong) else None},  # NumPy warns of a logarithm of 0
        {"top_k": 5, "top_p": 0.8},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"structured_output": StructuredOutput(GrammarKind.REGEX, "a")},
    ]
    requests = [request(seed=row, **params) for row, params in enumerate(2 * kinds)]
    logits_RV = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3))
    logits_RV[:4] = -math.inf if wrong < 0 else logits_RV[:4]
    logits_RV[range(4), [1, 88, 88, 1]] = wrong
    sampler = device_sampler(device)
    found = sampler(logits_RV.to(device), requests).wait()
    assert [token.is_finite for token in found] == [False] * 4 + [True] * 4
    assert [token.is_finite for token in sample(logits_RV, requests)] == [False] * 4 + [True] * 4
    assert found[4:] == sampler(logits_RV[4:].to(device), requests[4:]).wait()


class Recorded:
    """Rank 1 of two ranks. It receives what rank 0 has broadcast, and left here."""

    size = 2

    def __init__(self, rank: int, sent: list[torch.Tensor]) -> None:
        self.rank = rank
        self._sent = sent

    def all_reduce_(self, x: torch.Tensor) -> None:
        raise NotImplementedError

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def broadcast_(self, x: torch.Tensor) -> None:
        if self.rank == 0:
            self._sent.append(x.clone())
        else:
            x.copy_(self._sent.pop(0))

    def silent(self) -> AbstractContextManager[None]:
        raise NotImplementedError


def test_other_ranks_receive_the_first_ranks_tokens(device: torch.device) -> None:
    logits_RV = torch.zeros(2, VOCAB)
    requests = [request(seed=seed, logprobs=0) for seed in range(2)]
    sent: list[torch.Tensor] = []
    samplers = [DeviceSampler(VOCAB, 4, device, collectives=Recorded(rank, sent)) for rank in range(2)]
    first = samplers[0](logits_RV.to(device), requests).wait()
    second = samplers[1](None, requests).wait()
    assert [token.token_id for token in second] == [token.token_id for token in first]
    assert samplers[1].sampled_R[:2].tolist() == samplers[0].sampled_R[:2].tolist()
    assert all(token.logprobs is not None for token in first)
    assert all(token.logprobs is None for token in second)


def test_rows_may_be_parts_of_longer_ones(device: torch.device, generator: torch.Generator) -> None:
    """If the ranks cannot divide the vocabulary equally, the numbers after a row are no logits."""
    wide_RV = torch.randn(4, VOCAB + 3, generator=generator).to(device)
    wide_RV[:, VOCAB:] = 100.0
    requests = [
        request(seed=0, temperature=0.0),
        request(seed=1, logprobs=2),
        request(seed=2, top_p=0.8),
        request(seed=3, repetition_penalty=1.2),
    ]
    parts_RV = wide_RV[:, :VOCAB]
    expected = device_sampler(device)(parts_RV.contiguous(), requests).wait()
    assert device_sampler(device)(parts_RV, requests).wait() == expected


def test_a_request_draws_the_same_in_any_batch(device: torch.device, generator: torch.Generator) -> None:
    logits_RV = torch.randn(4, VOCAB, generator=generator).to(device)
    requests = [request(seed=seed, top_p=0.8, temperature=1.5) for seed in range(4)]
    sampler = device_sampler(device)
    together = sampler(logits_RV, requests).wait()
    alone = [sampler(logits_RV[row : row + 1], requests[row : row + 1]).wait()[0] for row in range(4)]
    assert alone == together


def test_keys_of_all_rows_at_once_are_those_of_each() -> None:
    seeds, positions = [0, 1, 2**63 - 1, 12345], [0, 7, 2**31, 99_999]
    expected = [row_keys(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    keys_R2 = keys_at(seed_states(seeds), np.array(positions, dtype=np.uint64))
    assert [tuple(row) for row in keys_R2.view(np.uint32).tolist()] == expected


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.3])
@pytest.mark.parametrize("frequency_penalty", [0.0, 0.4])
def test_edits_of_a_request_that_grew_are_those_of_a_new_one(
    repetition_penalty: float, frequency_penalty: float
) -> None:
    params: dict[str, Any] = {
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": {3: 1.0, 20: -1.0},
        "min_tokens": 6,
    }
    tokens = (9, 3, 9, 40, 7, 1)
    old = request(outputs=(), **params)
    for num_outputs, token_id in enumerate(tokens, 1):
        list_edits([old], [0], VOCAB)
        old.append_token(token_id)
        grown = list_edits([old], [0], VOCAB)
        new = list_edits([request(outputs=tokens[:num_outputs], **params)], [0], VOCAB)
        assert grown.edits_EF.tolist() == new.edits_EF.tolist()
        assert sorted(set(grown.edits_EF[:, 1].tolist())) == grown.edits_EF[:, 1].tolist()
