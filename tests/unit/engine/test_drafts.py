"""Drafts: what prompt lookup guesses, and how many guesses a request gets."""

import random

import numpy as np
import pytest

from baton.sampling import SamplingParams
from baton.step import CachedRequestData, SchedulerOutput
from engine.acceptance import Acceptance
from engine.batch import RequestBatch, RunnerRequest
from engine.drafts import MAX_CANDIDATES, MAX_SEARCHED, Drafter, NGramProposer
from engine.request_table import IntArray
from tests.factories.stepping import make_request_data


def tokens(*token_ids: int) -> IntArray:
    return np.array(token_ids, np.int64)


@pytest.mark.parametrize(
    ("token_ids", "guess"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the latest occurrence
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1]),  # of the longest match
        ([1, 2, 5, 1, 2], [5, 1, 2]),
        ([3, 4, 3, 4], [3, 4, 3]),  # an occurrence that overlaps goes on like this
        ([6, 6, 6], [6, 6, 6]),
        ([1, 2, 3, 9, 2], []),  # one token is too few
        ([1, 2, 3, 4], []),
        ([5, 5], []),
        ([5], []),
    ],
)
def test_prompt_lookup_guesses_what_followed(token_ids: list[int], guess: list[int]) -> None:
    assert NGramProposer(2, 4).propose(tokens(*token_ids), 3) == guess


def slow_guess(token_ids: list[int], shortest: int, longest: int, num_tokens: int) -> list[int]:
    """A guess by the definition: takes the longest run of last tokens that occurred before, and its latest
    occurrence."""
    for length in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[-length:]:
                guess = list(token_ids)
                for place in range(end, end + num_tokens):
                    guess.append(guess[place])
                return guess[len(token_ids) :]
    return []


@pytest.mark.parametrize("seed", range(10))
def test_prompt_lookup_is_what_its_definition_says(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        token_ids = rng.choices(range(rng.choice((1, 2, 3, 9))), k=rng.randrange(1, 30))
        shortest = rng.randrange(1, 4)
        longest = rng.randrange(shortest, 6)
        found = NGramProposer(shortest, longest).propose(tokens(*token_ids), 4)
        assert found == slow_guess(token_ids, shortest, longest, 4), token_ids


@pytest.mark.parametrize(("num_between", "guess"), [(MAX_SEARCHED - 5, [9]), (MAX_SEARCHED, [])])
def test_only_the_latest_tokens_are_searched(num_between: int, guess: list[int]) -> None:
    token_ids = np.concatenate((tokens(1, 2, 9), np.arange(100, 100 + num_between), tokens(1, 2)))
    assert NGramProposer(2, 4).propose(token_ids, 1) == guess


def test_only_the_latest_occurrences_of_the_last_token_are_compared() -> None:
    """The first two tokens equal the last two, but too many occurrences of the last token lie in between."""
    between = np.full(2 * MAX_CANDIDATES, 2)
    between[::2] = np.arange(100, 100 + MAX_CANDIDATES)
    token_ids = np.concatenate((tokens(1, 2, 9), between, tokens(1, 2)))
    assert NGramProposer(2, 4).propose(token_ids, 1) == []
    fewer = np.concatenate((token_ids[:MAX_CANDIDATES], tokens(1, 2)))
    assert NGramProposer(2, 4).propose(fewer, 1) == [9]


def outcome(acceptance: Acceptance, right: list[bool], cost: float, most: int = 4) -> list[int]:
    """How many drafts each step gets, if the drafts of a step are either all right or all wrong."""
    counts = []
    for is_right in right:
        counts.append(min(most, acceptance.num_useful(cost)))
        if counts[-1]:
            acceptance.verified(counts[-1], counts[-1] if is_right else 0)
    return counts


def test_right_drafts_get_more_and_wrong_ones_fewer_until_there_is_a_probe_now_and_then() -> None:
    acceptance = Acceptance()
    assert outcome(acceptance, [True] * 3, 0.08) == [4, 4, 4]
    counts = outcome(acceptance, [False] * 300, 0.08)
    assert counts[:12] == sorted(counts[:12], reverse=True)
    assert set(counts[20:]) == {0, 1}
    assert 0 < sum(counts[20:]) * 0.08 <= 0.0101 * len(counts[20:]), "a draft costs 8 % of a token"
    while not acceptance.num_useful(0.08):
        pass
    acceptance.verified(1, 1)
    assert outcome(acceptance, [True] * 3, 0.08) == [4, 4, 4], "a probe that is right begins anew"


def test_the_more_a_draft_costs_the_likelier_it_must_be() -> None:
    counts = []
    for cost in (0.1, 0.3, 0.5, 0.8):
        acceptance = Acceptance()
        acceptance.verified(4, 2)
        counts.append(acceptance.num_useful(cost))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 1
    assert counts[-1] == 0


def test_a_request_whose_drafts_are_always_right_leaves_probing_where_drafts_cost_much() -> None:
    acceptance, cost = Acceptance(), 50 / 62
    numbers = []
    for _ in range(2_000):
        numbers.append(acceptance.num_useful(cost))
        if numbers[-1]:
            acceptance.verified(numbers[-1], numbers[-1])
    assert all(numbers[-10:])


def test_a_step_of_four_tokens_is_the_smallest_with_a_draft() -> None:
    """So the configuration refuses smaller ones."""
    counts = [drafts_of(Drafter(NGramProposer(2, 4), 4, most, num_equal_rows=1e6), 1) for most in (3, 4)]
    assert counts == [[], [1]]


@pytest.mark.parametrize(
    ("num_requests", "num_drafts"), [(1, 4), (5, 4), (8, 3), (16, 1), (17, 0), (32, 0), (40, 0)]
)
def test_drafts_leave_half_of_a_step_to_prompts(num_requests: int, num_drafts: int) -> None:
    counts = drafts_of(
        Drafter(NGramProposer(2, 4), 4, max_num_batched_tokens=64, num_equal_rows=1e6), num_requests
    )
    assert counts == ([num_drafts] * num_requests if num_drafts else [])


def test_no_draft_reaches_beyond_max_tokens() -> None:
    drafter = Drafter(NGramProposer(2, 4), 4, max_num_batched_tokens=64, num_equal_rows=1e6)
    assert [drafts_of(drafter, 1, max_tokens=most) for most in (9, 4, 3, 2, 1)] == [[4], [3], [2], [1], []]


class CostlyProposer(NGramProposer):
    """A guess takes most of a token's time."""

    cost = 0.7


def test_what_guessing_costs_makes_drafts_fewer() -> None:
    counts = [
        drafts_of(Drafter(proposer, 4, 64, num_equal_rows=1e6), 1, num_right=1)
        for proposer in (NGramProposer(2, 4), CostlyProposer(2, 4))
    ]
    assert counts == [[4], [2]]


@pytest.mark.parametrize(("num_own", "num_drafted"), [(0, 2), (1, 0), (2, 2)])
def test_no_guess_that_takes_time_delays_a_first_token(num_own: int, num_drafted: int) -> None:
    """Guesses for other requests do not, either. Prompt lookup takes no time."""
    for proposer, expected in ((NGramProposer(2, 4), 2), (CostlyProposer(2, 4), num_drafted)):
        batch, requests = repeating_requests(2, SamplingParams(max_tokens=100))
        batch.extend(requests[0], [1, 2, 3, 1, 2, 3])
        batch.extend(requests[1], [1, 2, 3][:num_own])
        drafter = Drafter(proposer, 4, 64, num_equal_rows=1e6)
        for request in requests:
            request.acceptance.verified(4, 4)
        drafted = drafter.draft(requests, batch, any_first_token=num_own == 1)
        assert sum(bool(drafts) for _, drafts in drafted) == expected


def drafts_of(
    drafter: Drafter, num_requests: int, *, max_tokens: int = 100, num_right: int = 50
) -> list[int]:
    """The numbers of drafts of requests that repeat themselves, and whose drafts were right `num_right` times."""
    batch, requests = repeating_requests(num_requests, SamplingParams(max_tokens=max_tokens))
    for request in requests:
        for _ in range(num_right):
            request.acceptance.verified(4, 4)
    return [len(drafts) for _, drafts in drafter.draft(requests, batch, any_first_token=False)]


def repeating_requests(count: int, params: SamplingParams) -> tuple[RequestBatch, list[RunnerRequest]]:
    names = [f"r{i}" for i in range(count)]
    batch = RequestBatch(block_size=4)
    batch.update(
        SchedulerOutput(
            scheduled_new_reqs=tuple(
                make_request_data([1, 2, 3] * 4, params=params, request_id=name) for name in names
            ),
            scheduled_cached_reqs=CachedRequestData(),
            num_scheduled_tokens=dict.fromkeys(names, 12),
            total_num_scheduled_tokens=12 * count,
            preempted_req_ids=frozenset(),
            finished_req_ids=frozenset(),
        )
    )
    return batch, [batch[name] for name in names]
