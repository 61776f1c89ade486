"""Behaviour 27 in the scheduler: windows give blocks back, hits need what a window reaches, and blocks are counted."""

from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.kv import TransferRole
from baton.kv_groups import NULL_BLOCK_ID, KVGroups
from baton.step import KVConnectorOutput
from scheduler import Request
from scheduler.kv_cache import KVCache
from tests.factories.driving import Driver
from tests.factories.paged_memory import PagedMemory
from tests.factories.scheduling import (
    FakeConnector,
    FakeRunner,
    make_request,
    make_scheduler,
    received,
    token_at,
)

TWO = KVGroups(num_full=1, num_windowed=1, window=32)
"""With blocks of 16, a row leaves when 15 more tokens than 32 follow its first."""


def make_kv(num_blocks: int = 41, groups: KVGroups = TWO) -> KVCache:
    return KVCache(num_blocks, 16, enable_caching=True, hash_key=b"k" * 16, groups=groups)


def arrive(kv: KVCache, prompt: range | list[int]) -> Request:
    request = make_request(prompt=prompt)
    kv.tokens_arrived(request)
    return request


def compute(kv: KVCache, prompt: range | list[int], step: int = 16) -> Request:
    """A prompt computed in steps of so many tokens, whose windows give back blocks on the way."""
    request = arrive(kv, prompt)
    assert kv.open_table(request, min(step, request.num_tokens))
    while request.num_computed_tokens < request.num_tokens:
        num_tokens = min(request.num_computed_tokens + step, request.num_tokens)
        assert kv.extend_table(request, num_tokens) is not None
        request.num_computed_tokens = num_tokens
    return request


def pattern(kv: KVCache, request: Request) -> str:
    """`#` for a block and `.` for the null block, row by row."""
    marks = "".join("." if block_id == NULL_BLOCK_ID else "#" for block_id in kv.block_ids(request))
    size = kv.groups.num_groups
    return " ".join(marks[start : start + size] for start in range(0, len(marks), size))


def hits(kv: KVCache, prompt: range | list[int], num_loaded: int | None = None) -> str:
    found = kv.find_cached_prefix(arrive(kv, prompt), num_loaded)
    marks = "".join("." if block.block_id == NULL_BLOCK_ID else "#" for block in found)
    return " ".join(marks[start : start + 2] for start in range(0, len(marks), 2))


def make_driver(groups: KVGroups = TWO, num_ahead: int = 0, **settings: Any) -> Driver:
    connector = FakeConnector(holds=True, memory=PagedMemory(16, groups))
    scheduler = make_scheduler(connector, kv_groups=groups, **settings)
    return Driver(scheduler, FakeRunner(memory=connector.memory), num_ahead, connector)


def test_c27_blocks_that_left_the_window_are_free_and_the_others_stay() -> None:
    kv = make_kv()
    request = compute(kv, range(80))
    assert kv.extend_table(request, 81) is not None  # token 80 attends to 49 to 80
    assert pattern(kv, request) == "#. #. #. ## ## ##"
    assert kv.counts().free == 40 - 9
    request.num_computed_tokens = 95
    assert kv.extend_table(request, 96) == ()  # token 95 attends to 64 to 95
    assert pattern(kv, request) == "#. #. #. #. ## ##"
    kv.free(request)
    assert kv.counts().free == 40
    kv.check_integrity()


def test_c27_a_prompt_in_parts_needs_no_more_than_its_windows() -> None:
    kv = make_kv(num_blocks=1 + 20 + 4)
    request = compute(kv, range(320))
    assert kv.counts().free == 1, "20 rows, and a window of two rows beside the one that is computed"
    assert pattern(kv, request).endswith("#. ## ## ##")


def test_c27_a_conversation_goes_on_where_the_last_window_is_cached() -> None:
    kv = make_kv()
    kv.free(compute(kv, range(80)))
    assert hits(kv, range(90)) == "#. #. #. ## ##"
    assert hits(kv, range(80)) == "#. #. ## ##", "one token is computed: the last row does not count"


def test_c27_a_shared_text_hits_while_its_last_window_is_in_the_pool() -> None:
    """64 shared tokens: the windowed group needs rows 2 and 3 of them, which have left the window but are cached."""
    kv = make_kv()
    first = compute(kv, range(160))
    assert pattern(kv, first).startswith("#. #. #. #. #. #. #.")
    assert hits(kv, [*range(64), *[7] * 20]) == "#. #. ## ##"


def test_c27_a_shared_text_whose_last_window_was_evicted_hits_only_what_all_groups_have() -> None:
    kv = make_kv(num_blocks=1 + 10 + 3 + 6)
    compute(kv, range(160))
    fresh = arrive(kv, [5] * 33)
    assert kv.open_table(fresh, 33), "six blocks: those that left first are taken from the cache"
    assert hits(kv, [*range(64), *[7] * 20]) == "", "rows 2 and 3 of the windowed group are gone"
    assert hits(kv, range(161)) != "", "the end of the prompt is still there"


def test_c27_hits_begin_with_what_there_is_of_a_short_prefix() -> None:
    kv = make_kv()
    kv.free(compute(kv, range(40)))
    assert hits(kv, [*range(16), *[7] * 20]) == "##", "one row, although a window would reach two"


def test_c27_a_load_needs_only_the_window_of_its_last_token() -> None:
    kv = make_kv(num_blocks=1 + 10 + 3 + 6)
    compute(kv, range(160))
    fresh = arrive(kv, [5] * 33)
    assert kv.open_table(fresh, 33)
    prompt = [*range(96), *[7] * 100]
    assert hits(kv, prompt) == ""
    assert hits(kv, prompt, num_loaded=196) == "#. #. #. #. #. #.", "the rest comes, and its window with it"


def test_c27_a_prefix_is_as_long_as_in_the_full_group_that_has_the_least_of_it() -> None:
    kv = make_kv(num_blocks=1 + 10, groups=KVGroups(num_full=2, num_windowed=1, window=32))
    kv.free(compute(kv, range(48)))
    fresh = arrive(kv, [7] * 16)
    assert kv.open_table(fresh, 16), "three blocks: an unused one, and rows 2 and 1 of the first full group"
    assert len(kv.find_cached_prefix(arrive(kv, range(64)))) == 3, "one row, in three groups"


def test_c27_hits_that_left_the_window_by_a_swapped_out_end_are_given_back() -> None:
    kv = make_kv()
    kv.free(compute(kv, range(40)))
    request = arrive(kv, range(97))
    found = kv.find_cached_prefix(request)
    assert NULL_BLOCK_ID not in [block.block_id for block in found]
    assert kv.open_table(request, 97, found, num_ready=96)
    assert pattern(kv, request) == "#. #. #. #. ## ## ##"
    kv.check_integrity()


def test_c27_swapped_out_are_only_the_blocks_that_are_needed() -> None:
    driver = make_driver(
        preemption="swap",
        num_swap_blocks=40,
        num_blocks=1 + 22,
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
    )
    old, young = make_request(100, max_tokens=40), make_request(100, max_tokens=40)
    driver.add(old, young)
    while not (plan := driver.step()).preempted_req_ids:
        pass
    num_rows = -(-young.num_computed_tokens // 16)
    num_before_window = (young.num_computed_tokens - 31) // 16
    assert len(plan.swap_out) == 2 * num_rows - num_before_window < 2 * num_rows
    tokens = driver.run_to_end()
    for request in (old, young):
        assert tokens[request.request_id] == [token_at(request.request_id, at) for at in range(40)]
    counters = driver.scheduler.counters()
    assert counters["swapped_in_blocks"] == counters["swapped_out_blocks"]


def test_c27_a_consumer_reserves_only_what_it_can_use() -> None:
    driver = make_driver()
    request = make_request(320, max_tokens=3, role=TransferRole.CONSUMER)
    driver.add(request)
    driver.step()
    assert driver.connector is not None
    block_ids, num_tokens = driver.connector.started[request.request_id]
    assert num_tokens == 320
    assert block_ids.count(NULL_BLOCK_ID) == (320 - 31) // 16 == 18
    counts = driver.scheduler.kv_block_counts()
    assert counts.referenced == 21 + 3, "the first new token has its slot, too"
    token_id = token_at(request.request_id, 0)
    outputs = driver.scheduler.update_connector_output(received(request, token_id))
    driver.note(output for news in outputs.values() for output in news)
    assert driver.run_to_end()[request.request_id] == [token_at(request.request_id, at) for at in range(3)]


def test_c27_a_producer_leases_only_what_its_consumer_can_use() -> None:
    driver = make_driver()
    request = make_request(320, role=TransferRole.PRODUCER)
    driver.add(request)
    driver.step()
    counts = driver.scheduler.kv_block_counts()
    assert (counts.leased, counts.referenced) == (20 + 2, 0)
    output = KVConnectorOutput(finished_sending=(request.request_id,))
    driver.scheduler.update_connector_output(output)
    assert driver.scheduler.kv_block_counts().free == 100


@pytest.mark.parametrize(("budget", "num_tokens"), [(16, 1535), (1024, 799)])
def test_c27_the_longest_prompt_is_what_the_pool_has_room_for(budget: int, num_tokens: int) -> None:
    """100 blocks: with parts of 16 tokens a window has 4 rows at most, so 96 are left to the other group."""
    driver = make_driver(max_num_batched_tokens=budget)
    with pytest.raises(InvalidRequest, match="slots of KV cache"):
        driver.add(make_request(num_tokens + 1, max_tokens=1))
    request = make_request(num_tokens, max_tokens=1)
    driver.add(request)
    tokens = driver.run_to_end()
    assert tokens[request.request_id] == [token_at(request.request_id, 0)]


def test_c27_routers_are_told_of_the_first_group_only() -> None:
    kv = make_kv()
    compute(kv, range(80))
    (stored,) = kv.events.take_events()
    assert len(stored.block_hashes) == len(set(stored.block_hashes)) == 5  # type: ignore[union-attr]
