"""Behaviours 21 to 26: what may be hit, what is evicted, and what a failure leaves behind."""

import pytest

from scheduler import RequestStatus
from scheduler.block_events import BlockEvents
from scheduler.block_pool import BlockPool
from scheduler.kv_cache import KVCache
from tests.factories.scheduling import (
    FakeRunner,
    assert_at_rest,
    make_request,
    make_scheduler,
    run_step,
    run_to_end,
)

SIZE = 16


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, BlockEvents(max_pending=8, snapshot=tuple))


def make_kv(num_blocks: int = 11) -> KVCache:
    return KVCache(num_blocks, SIZE, enable_caching=True, hash_key=b"k" * 16)


def num_hits(kv: KVCache, **options: object) -> int:
    request = make_request(**options)  # type: ignore[arg-type]
    kv.tokens_arrived(request)
    return len(kv.find_cached_prefix(request))


def fill(kv: KVCache, **options: object) -> object:
    """Computes a prompt's blocks and frees them again, so that they stay behind in the cache."""
    request = make_request(**options)  # type: ignore[arg-type]
    kv.tokens_arrived(request)
    assert kv.open_table(request, request.num_tokens)
    kv.free(request)
    return request


@pytest.mark.parametrize(("num_tokens", "hits"), [(15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2)])
def test_c21_only_full_blocks_hit_and_one_token_is_left_to_compute(num_tokens: int, hits: int) -> None:
    kv = make_kv()
    prompt = range(48)
    fill(kv, prompt=prompt)
    assert num_hits(kv, prompt=prompt[:num_tokens]) == hits


def test_c21_a_request_with_a_cached_prompt_computes_its_last_token() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    prompt = range(32)
    scheduler.add_request(make_request(prompt=prompt, max_tokens=1))
    run_to_end(scheduler, runner)
    again = make_request(prompt=prompt, max_tokens=1)
    scheduler.add_request(again)
    plan, outputs = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {again.request_id: 16}
    assert plan.scheduled_new_reqs[0].num_computed_tokens == outputs[0].num_cached_tokens == 16


def test_c21_a_request_that_is_preempted_and_resumes_counts_once() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    scheduler.add_request(make_request(40, max_tokens=3))
    run_step(scheduler, runner)
    assert scheduler.reset_prefix_cache(force=True)
    _, (output,) = run_step(scheduler, runner)
    assert output.num_cached_tokens == 0
    counters = scheduler.counters()
    assert (counters["preemptions"], counters["prefix_cache_queries"]) == (1, 40)


def test_c22_salts_separate_and_equal_salts_share() -> None:
    kv = make_kv()
    prompt = range(33)
    fill(kv, prompt=prompt, cache_salt="a")
    assert [num_hits(kv, prompt=prompt, cache_salt=salt) for salt in ("a", "b", "", None)] == [2, 0, 0, 0]


def test_c22_an_equal_block_after_a_different_prefix_is_not_the_same_block() -> None:
    kv = make_kv()
    fill(kv, prompt=[1] * 16 + [2] * 17)
    assert num_hits(kv, prompt=[3] * 16 + [2] * 17) == 0


def test_c22_hashes_depend_on_a_secret_key() -> None:
    one, two = make_request(prompt=range(16)), make_request(prompt=range(16))
    KVCache(8, SIZE, True, b"a" * 16).tokens_arrived(one)
    KVCache(8, SIZE, True, b"b" * 16).tokens_arrived(two)
    assert one.block_hashes != two.block_hashes


def test_each_block_is_hashed_once_as_tokens_arrive() -> None:
    kv, request = make_kv(), make_request(15)
    kv.tokens_arrived(request)
    assert request.block_hashes == []
    request.all_token_ids.append(1)
    kv.tokens_arrived(request)
    first = request.block_hashes[0]
    request.all_token_ids.extend(range(16))
    kv.tokens_arrived(request)
    assert len(request.block_hashes) == 2
    assert request.block_hashes[0] is first


def test_c23_the_least_recently_freed_chain_goes_first_and_its_tail_before_its_head() -> None:
    kv = make_kv(num_blocks=7)
    old, new = range(48), range(100, 148)
    fill(kv, prompt=old)
    fill(kv, prompt=new)  # the pool of six is full of cached blocks now
    one_block = make_request(5)
    assert kv.open_table(one_block, 5)
    assert (num_hits(kv, prompt=[*old, 0]), num_hits(kv, prompt=[*new, 0])) == (2, 3)
    two_more = make_request(20)
    kv.tokens_arrived(two_more)
    assert kv.open_table(two_more, 20)
    assert (num_hits(kv, prompt=[*old, 0]), num_hits(kv, prompt=[*new, 0])) == (0, 3)


def test_c23_a_block_about_to_be_hit_is_not_evicted_by_the_same_allocation() -> None:
    kv = make_kv(num_blocks=5)
    prompt = [*range(32), *[7] * 30]
    fill(kv, prompt=prompt[:33])  # two cached blocks at the front of the eviction order, and a third
    request = make_request(prompt=prompt)
    kv.tokens_arrived(request)
    hits = kv.find_cached_prefix(request)
    kept = [block.block_id for block in hits]
    assert len(kept) == 2
    assert kv.open_table(request, 62, hits)
    assert kv.block_ids(request)[:2] == tuple(kept)
    assert len(set(kv.block_ids(request))) == 4
    kv.check_integrity()


def test_c24_a_failed_allocation_changes_nothing() -> None:
    kv = make_kv(num_blocks=5)
    fill(kv, prompt=range(33))
    request = make_request(prompt=[*range(32), *[9] * 60])
    kv.tokens_arrived(request)
    hits = kv.find_cached_prefix(request)
    before = (kv.counts(), [block.ref_count for block in hits])
    assert not kv.open_table(request, request.num_tokens, hits)
    assert (kv.counts(), [block.ref_count for block in hits]) == before
    assert kv.block_ids(request) == ()
    kv.check_integrity()


def test_c25_a_reset_refuses_while_blocks_are_in_use_and_a_forced_one_preempts_first() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    requests = [make_request(33, max_tokens=4) for _ in range(2)]
    for request in requests:
        scheduler.add_request(request)
    run_step(scheduler, runner)
    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(force=True)
    assert [request.status for request in requests] == [RequestStatus.PREEMPTED] * 2
    plan, _ = run_step(scheduler, runner)
    assert plan.preempted_req_ids == {request.request_id for request in requests}
    assert list(plan.num_scheduled_tokens.values()) == [34, 34]
    run_to_end(scheduler, runner)
    assert scheduler.reset_prefix_cache()
    again = make_request(prompt=requests[0].prompt_token_ids)
    scheduler.add_request(again)
    assert scheduler.schedule().num_scheduled_tokens == {again.request_id: 33}


def test_c26_hits_are_counted_once_per_admission_and_not_per_retry() -> None:
    scheduler, runner = make_scheduler(num_blocks=7), FakeRunner()
    prompt = range(33)
    scheduler.add_request(make_request(prompt=prompt, max_tokens=1))
    run_to_end(scheduler, runner)
    blocker = make_request(40, max_tokens=6)
    scheduler.add_request(blocker)
    run_step(scheduler, runner)
    waiting = make_request(
        prompt=[*prompt, *[5] * 30], max_tokens=1
    )  # hits two blocks, but the rest has no room
    scheduler.add_request(waiting)
    for _ in range(3):
        run_step(scheduler, runner)
        assert waiting.status is RequestStatus.WAITING
    run_to_end(scheduler, runner)
    assert scheduler.counters()["prefix_cache_queries"] == 33 + 40 + 63
    assert scheduler.counters()["prefix_cache_hits"] == 32


def test_without_caching_nothing_is_hashed_and_nothing_hits() -> None:
    scheduler, runner = make_scheduler(enable_prefix_caching=False), FakeRunner()
    requests = [make_request(prompt=range(40), max_tokens=1) for _ in range(2)]
    for request in requests:
        scheduler.add_request(request)
        run_to_end(scheduler, runner)
    assert [request.block_hashes for request in requests] == [[], []]
    assert_at_rest(scheduler)


def test_two_blocks_may_hold_the_same_content_and_the_second_outlives_the_first() -> None:
    pool = make_pool(4)
    first, second = pool.allocate(2)
    pool.cache(first, b"same")
    pool.cache(second, b"same")
    assert pool.cached_prefix([b"same"]) == [first]
    pool.free([first])
    pool.allocate(2)  # takes the third block, then the first
    assert pool.cached_prefix([b"same"]) == [second]
    pool.check_integrity()


def test_freeing_twice_is_a_bug_and_says_so() -> None:
    pool = make_pool(3)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])
