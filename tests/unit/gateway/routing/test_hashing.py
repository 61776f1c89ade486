"""Hashes of a prompt's blocks, made ahead of the choice of workers in portions."""

from dataclasses import replace

import pytest

from baton.sampling import SamplingParams
from gateway.requests.retry import RetryState
from gateway.routing.placement import BlockHashes, Placement
from gateway.routing.router import HASHED_AT_ONCE
from tests.factories.dispatching import make_request
from tests.unit.gateway.routing.test_kv_aware import LONG, measured, pair_of, report_blocks


@pytest.mark.parametrize("num_cached", [0, 160, 20_000, 40_000])
def test_hashes_made_ahead_in_portions_lead_to_the_same_choice(num_cached: int) -> None:
    """This holds however much is cached. Hashing goes at most one portion beyond what workers have. The memo
    may grow further."""
    asked = replace(LONG, token_ids=tuple(range(40_001)))
    router = pair_of()
    report_blocks(router, "p1", asked, num_cached)
    hashes: BlockHashes = {}
    num_before = 0
    for _ in router.hashing(asked.token_ids, None, hashes):
        (known,) = hashes.values()
        assert 0 < len(known) - num_before <= HASHED_AT_ONCE
        num_before = len(known)
    assert num_before <= min(40_000, num_cached) // 16 + HASHED_AT_ONCE
    to_compute = router.num_tokens_to_compute(asked)
    assert to_compute == {"p0": 40_001, "p1": 40_001 - num_cached}
    assert router.num_tokens_to_compute(replace(asked, block_hashes=hashes)) == to_compute
    longer = (*asked.token_ids, *range(40))
    report_blocks(router, "p0", replace(asked, token_ids=longer), 40_032)
    again = replace(asked, token_ids=longer, block_hashes=hashes)
    assert router.num_tokens_to_compute(again)["p0"] == len(longer) - 40_032
    assert router.num_tokens_to_compute(replace(asked, block_hashes=hashes))["p0"] == 1, (
        "fewer tokens than are hashed"
    )


def test_a_worker_with_other_blocks_may_come_between_two_portions() -> None:
    router, hashes = pair_of(), BlockHashes()
    asked = replace(LONG, token_ids=tuple(range(40_001)))
    report_blocks(router, "p1", asked, 40_000)
    portions = router.hashing(asked.token_ids, None, hashes)
    next(portions)
    router.on_status(measured("p2", block_size=32))
    assert len([*portions]) > 0
    report_blocks(router, "p2", asked, 20_000, block_size=32)
    assert router.num_tokens_to_compute(replace(asked, block_hashes=hashes))["p2"] == 20_001


def test_a_retried_answers_tokens_are_not_taken_for_another_answers() -> None:
    """The answers share the hashes of their prompt."""
    router, shared = pair_of(), BlockHashes()
    prompt, mine, others = tuple(range(160)), (7,) * 33, (8,) * 33
    for name, output in (("p0", mine), ("p1", others)):
        report_blocks(router, name, replace(LONG, token_ids=prompt + output), 192)
    assert len([*router.hashing(prompt, None, shared)]) == 1
    places = []
    for output in (mine, others):
        params = SamplingParams(max_tokens=99)
        request = make_request(
            prompt_token_ids=prompt, sampling_params=params, cache_salt=None, block_hashes=shared
        )
        placement = RetryState(request, router, "retry", 0.0).route(output)
        assert isinstance(placement, Placement)
        places.append((placement.prefill, placement.num_prefill_tokens))
    assert places == [("p0", 1), ("p1", 1)]
    assert [len(of_size) for of_size in shared.values()] == [9]
