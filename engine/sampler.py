"""Samples tokens from logits, by each request's own parameters; knows no model, keeps no state between steps.

Each row depends only on its own logits, request and (seed, position). So a request samples the same tokens
alone, in any batch, after preemption, and on another worker.

Shape suffixes: R rows, V vocabulary, C likeliest candidates of a row, P parts of a row, S values of a part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.request import TokenLogprobs
from baton.sampling import SamplingParams
from engine.batch import SampledRequest
from engine.collectives import SINGLE_RANK, Collectives
from engine.counter_rng import gumbel_noise, row_keys
from engine.request_table import IntArray

MIN_TEMPERATURE = 1e-30
"""Lower temperatures are raised to this one, since float32 cannot divide by them; the result is the arg
max."""
CANDIDATES = 256
"""How many of the likeliest tokens top_p considers at first; if the nucleus is larger, 16 times as many, and so on."""
PART_SIZE = 256
"""Size of the parts in which `arg_max` searches a row, if the vocabulary is a multiple of this size."""
SMALLEST_PART = 16
"""If the vocabulary only allows smaller parts than this, torch's argmax is faster."""
ROWS_AT_ONCE = 4
"""How many rows of noise are made at once: few, so that the intermediate values stay in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one row; `logprobs` if the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None
    is_finite: bool = True
    """False: the row's logits contain NaN or infinity, so the token means nothing. Only rank 0 knows this."""


class SampledTokens(Protocol):
    """Sampled tokens that the device may still compute."""

    def wait(self) -> list[SampledToken]:
        """Waits for the tokens, one per row; call it once. Then all work that was launched earlier is done, too."""
        ...


class Sampler(Protocol):
    """Draws one token per row, for the request of that row."""

    def __call__(self, logits_RV: torch.Tensor | None, requests: Sequence[SampledRequest]) -> SampledTokens:
        """Draws the tokens, and leaves the logits unchanged. On a rank that receives the tokens, the logits are
        None."""
        ...


class TorchSampler:
    """Samples at once on rank 0, which sends its tokens to the other ranks. Log-probabilities stay on rank 0."""

    def __init__(self, collectives: Collectives = SINGLE_RANK) -> None:
        self._collectives = collectives

    def __call__(self, logits_RV: torch.Tensor | None, requests: Sequence[SampledRequest]) -> "KnownTokens":
        if self._collectives.rank == 0:
            assert logits_RV is not None, "nothing to sample from"
            tokens = sample(logits_RV, requests)
            self._collectives.broadcast_(torch.tensor([token.token_id for token in tokens]))
            return KnownTokens(tokens)
        token_ids_R = torch.empty(len(requests), dtype=torch.int64)
        self._collectives.broadcast_(token_ids_R)
        return KnownTokens([SampledToken(token_id, None) for token_id in token_ids_R.tolist()])


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """Tokens that the host knows already, so `wait` returns at once."""

    tokens: list[SampledToken]

    def wait(self) -> list[SampledToken]:
        return self.tokens


def sample(logits_RV: torch.Tensor, requests: Sequence[SampledRequest]) -> list[SampledToken]:
    """Draws one token per row, for the request of that row; does not change the logits."""
    raw_RV = logits_RV.to(torch.float32)
    processed_RV = _processed(raw_RV, requests)
    likeliest_R = arg_max(processed_RV)
    is_finite = _are_finite(raw_RV, likeliest_R if processed_RV is raw_RV else None)
    token_ids = likeliest_R.tolist()
    random_rows = [row for row, request in enumerate(requests) if not request.sampling_params.is_greedy]
    if random_rows:
        rows_RV = processed_RV if len(random_rows) == len(requests) else processed_RV[random_rows]
        drawn = _draw(rows_RV, [requests[row] for row in random_rows])
        for row, token_id in zip(random_rows, drawn, strict=True):
            token_ids[row] = token_id
    logprobs = _logprobs(raw_RV, token_ids, requests)
    return [
        SampledToken(token_id, logprobs.get(row), is_finite[row]) for row, token_id in enumerate(token_ids)
    ]


def arg_max(x_RV: torch.Tensor) -> torch.Tensor:
    """For each row, the index of its largest value (of the first, if several are equal), or of its first NaN.

    On a CPU, torch's argmax takes ten times as long as its amax. So this function first uses amax to find the
    part of the row with the largest value. If the vocabulary has no suitable divisor, it calls argmax on whole rows.
    """
    num_rows, vocab_size = x_RV.shape
    size = math.gcd(vocab_size, PART_SIZE)
    if size < SMALLEST_PART:
        return x_RV.argmax(-1)
    parts_RPS = x_RV.view(num_rows, vocab_size // size, size)
    part_R = parts_RPS.amax(-1).argmax(-1)
    part_RS = parts_RPS[torch.arange(num_rows, device=x_RV.device), part_R]
    return part_R * size + part_RS.argmax(-1)


def _are_finite(raw_RV: torch.Tensor, likeliest_R: torch.Tensor | None) -> list[bool]:
    """For each row, whether its largest logit is finite.

    If a row contains NaN or +inf, its largest logit is NaN or +inf. It is -inf only if all logits are -inf.
    `likeliest_R`: the index of each row's largest logit, if known.
    """
    largest_R = raw_RV.amax(-1) if likeliest_R is None else raw_RV.gather(1, likeliest_R[:, None])[:, 0]
    return [math.isfinite(logit) for logit in largest_R.tolist()]


def _processed(raw_RV: torch.Tensor, requests: Sequence[SampledRequest]) -> torch.Tensor:
    """The logits after bias, penalties and masks; the raw logits themselves if no row has any of these."""
    changed = [row for row, request in enumerate(requests) if is_processed(request)]
    if not changed:
        return raw_RV
    processed_RV = raw_RV.clone()
    for row in changed:
        _process_(processed_RV[row], requests[row])
    return processed_RV


def is_processed(request: SampledRequest) -> bool:
    """Whether the request's logits are changed before its next token is drawn."""
    p = request.sampling_params
    return bool(
        p.logit_bias or has_penalties(p) or request.num_output_tokens < p.min_tokens or request.matcher
    )


def has_penalties(p: SamplingParams) -> bool:
    """Whether a request's earlier tokens change the logits."""
    return bool(p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty)


def _process_(logits_V: torch.Tensor, request: SampledRequest) -> None:
    """Changes logits in place, in the order of SamplingParams; ignores token ids outside the vocabulary."""
    p, vocab_size = request.sampling_params, len(logits_V)
    if p.logit_bias:
        bias = {token_id: value for token_id, value in p.logit_bias.items() if token_id < vocab_size}
        logits_V[list(bias)] += torch.tensor(list(bias.values()), device=logits_V.device)
    if p.repetition_penalty != 1.0:
        seen = _on_device(request.count_tokens().tokens, logits_V)
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        outputs = request.count_outputs()
        penalties = p.presence_penalty + p.frequency_penalty * _on_device(outputs.counts, logits_V)
        logits_V[_on_device(outputs.tokens, logits_V)] -= penalties
    if request.num_output_tokens < p.min_tokens:
        logits_V[[token_id for token_id in request.stop_token_ids if token_id < vocab_size]] = -math.inf
    if request.matcher is not None:
        logits_V[torch.from_numpy(~request.matcher.allowed(request.drafts)).to(logits_V.device)] = -math.inf


def _draw(logits_RV: torch.Tensor, requests: Sequence[SampledRequest]) -> list[int]:
    """Samples by Gumbel-max from the tokens that the filters keep. A request without a seed has seed 0."""
    params = [request.sampling_params for request in requests]
    keys = [
        row_keys(p.seed or 0, request.num_output_tokens) for p, request in zip(params, requests, strict=True)
    ]
    temperatures_R1 = _column([max(p.temperature, MIN_TEMPERATURE) for p in params], logits_RV)
    scores_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / temperatures_R1
    if any(p.top_k or p.top_p < 1.0 or p.min_p > 0.0 for p in params):
        probs_RV = scores_RV.softmax(-1)
        scores_RV.masked_fill_(probs_RV < _lowest_kept(probs_RV, params), -math.inf)
    for start in range(0, len(params), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        scores_RV[rows] += gumbel_noise(keys[rows], logits_RV.shape[1], logits_RV.device)
    token_ids: list[int] = arg_max(scores_RV).tolist()
    return token_ids


def _lowest_kept(probs_RV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """R x 1: the lowest probability that top_k, top_p and min_p all keep. top_p counts only tokens that top_k keeps.

    Tokens with exactly this probability are all kept, so the result does not depend on how ties are sorted.
    """
    vocab_size = probs_RV.shape[1]
    top_ks = [min(p.top_k or vocab_size, vocab_size) for p in params]
    lowest_R1 = probs_RV.amax(-1, keepdim=True) * _column([p.min_p for p in params], probs_RV)
    filtered = [row for row, p in enumerate(params) if p.top_p < 1.0 or top_ks[row] < vocab_size]
    if filtered:
        lowest_of_filtered_R1 = _nucleus(
            probs_RV[filtered], [top_ks[row] for row in filtered], [params[row].top_p for row in filtered]
        )
        lowest_R1[filtered] = torch.maximum(lowest_R1[filtered], lowest_of_filtered_R1)
    return lowest_R1


def _nucleus(probs_RV: torch.Tensor, top_ks: list[int], top_ps: list[float]) -> torch.Tensor:
    """R x 1: the lowest probability that top_k and top_p keep. top_p is a share of the mass of top_k's tokens."""
    vocab_size = probs_RV.shape[1]
    top_k_R1 = torch.tensor(top_ks, device=probs_RV.device).unsqueeze(1)
    top_p_R1 = _column(top_ps, probs_RV)
    num_candidates = min(vocab_size, max([CANDIDATES, *(k for k in top_ks if k < vocab_size)]))
    while True:
        candidates_RC = probs_RV.topk(num_candidates, sorted=True).values
        mass_RC = candidates_RC.cumsum(-1)
        mass_R1 = torch.where(
            top_k_R1 <= num_candidates, mass_RC.gather(1, top_k_R1.clamp(max=num_candidates) - 1), 1.0
        )
        is_complete_R1 = (top_k_R1 <= num_candidates) | (mass_RC[:, -1:] >= top_p_R1)
        if num_candidates == vocab_size or bool(is_complete_R1.all()):
            break
        num_candidates = min(vocab_size, 16 * num_candidates)
    ranks_C = torch.arange(num_candidates, device=probs_RV.device)
    is_kept_RC = (ranks_C < top_k_R1) & (mass_RC - candidates_RC < top_p_R1 * mass_R1)
    is_kept_RC[:, 0] = True
    return candidates_RC.gather(1, is_kept_RC.sum(-1, keepdim=True) - 1)


def _logprobs(
    raw_RV: torch.Tensor, token_ids: list[int], requests: Sequence[SampledRequest]
) -> dict[int, TokenLogprobs]:
    """Log-probabilities by row, for the requests that asked for them; from the unprocessed logits."""
    wanted = {
        row: request.sampling_params.logprobs
        for row, request in enumerate(requests)
        if request.sampling_params.logprobs is not None
    }
    found = {}
    for row, num_top in wanted.items():
        logprobs_V = raw_RV[row].log_softmax(-1)
        top = logprobs_V.topk(min(num_top, len(logprobs_V)))
        logprob = logprobs_V[token_ids[row]]
        found[row] = TokenLogprobs(
            token_id=token_ids[row],
            logprob=float(logprob),
            rank=int((logprobs_V > logprob).sum()) + 1,
            top=tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
        )
    return found


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _on_device(array: IntArray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device)
