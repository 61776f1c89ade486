"""kv_aware and `auto`: what a placement costs, term by term, each test with all else equal."""

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from baton.block_hash import block_hashes
from baton.config import GatewayConfig, SchedulerConfig
from baton.messages.request_plane import KVEvents
from baton.request import StageTimes
from baton.worker import WorkerRole, WorkerStatus
from gateway.routing.cost import Need
from gateway.routing.placement import Mode, NoRoom, Placement, RouteQuery
from gateway.routing.policies import NUM_JOINT, KVAware
from gateway.routing.router import Router
from tests.factories.routing import KEY, ask, end, router_of, send, status

LONG = RouteQuery(token_ids=tuple(range(2000)), max_new_tokens=100)


def measured(name: str, running: int = 0, **values: Any) -> WorkerStatus:
    """Prefill of 10,000 tokens a second, and steps of 10 ms."""
    rates: dict[str, Any] = {"prefill_tokens_per_s": 1e4, "decode_step_s": 0.01}
    return status(name, running, **(rates | values))


def report_blocks(
    router: Router, worker: str, asked: RouteQuery, num_tokens: int, block_size: int = 16
) -> None:
    """Reports that the worker has the first tokens of the prompt in its prefix cache."""
    hashes = block_hashes(asked.token_ids[:num_tokens], block_size, KEY, asked.cache_salt)
    stored = b"".join(block_hash[:8] for block_hash in hashes)
    assert router.on_kv_events(worker, KVEvents(0, True, b"", stored))


def chosen(router: Router, asked: RouteQuery = LONG) -> tuple[set[str | None], set[str]]:
    placements = [router.route(asked) for _ in range(4)]
    return {placement.prefill for placement in placements}, {placement.decode for placement in placements}


def pair_of(*statuses: WorkerStatus, mode: str = "disaggregated", **config: Any) -> Router:
    names = {one.ref.name for one in statuses}
    others = [measured(name) for name in ("p0", "p1", "d0", "d1") if name not in names]
    return router_of("kv_aware", mode, *others, *statuses, **config)


def test_without_any_difference_all_take_turns() -> None:
    assert chosen(pair_of()) == ({"p0", "p1"}, {"d0", "d1"})


def test_a_prefix_hit_on_a_prefill_worker_wins() -> None:
    router = pair_of()
    report_blocks(router, "p1", LONG, 160)
    assert chosen(router)[0] == {"p1"}
    assert router.route(LONG).num_prefill_tokens == 2000 - 160


def test_a_prefix_hit_does_not_win_over_a_long_queue() -> None:
    router = pair_of(measured("p1", 1, num_queued_prompt_tokens=3000))
    report_blocks(router, "p1", LONG, 1600)
    assert chosen(router)[0] == {"p0"}
    router.on_status(measured("p1", 1, num_queued_prompt_tokens=1000))
    assert chosen(router)[0] == {"p1"}


def test_a_prompt_costs_each_that_waits_the_tokens_of_the_shorter_one() -> None:
    router = pair_of()
    for num_tokens in (3000, 500, 20):
        placement = Placement(Mode.DISAGGREGATED, "p1", "d0", num_prefill_tokens=num_tokens)
        router.sent("p1", placement)
        router.sent("d0", placement)
    estimate = router.estimate("p1")
    found = [estimate.num_tokens_in_order(num_tokens) for num_tokens in (10, 100, 1000, 9000)]
    assert found == [30, 220, 1520, 3520]
    assert router.estimate("d0").num_tokens_in_order(9000) == 0, "they are computed elsewhere"
    router.on_status(measured("p1", 5, num_queued_prompt_tokens=3600))
    assert estimate.num_tokens_in_order(10) == 30 + 2 * 10, "two of another gateway, of 80 tokens in all"
    assert estimate.num_tokens_in_order(100) == 220 + 80
    router.on_status(measured("p1", 3, num_queued_prompt_tokens=700))
    assert estimate.num_tokens_in_order(9000) == 700, "the rest is computed"


def test_a_sent_prompt_waits_at_the_worker_before_the_worker_reports_it() -> None:
    router = pair_of()
    report_blocks(router, "p1", LONG, 160)
    first = send(router, LONG)
    assert first.prefill == "p1"
    assert chosen(router)[0] == {"p0"}
    end(router, first)
    assert chosen(router)[0] == {"p1"}


def test_prompts_on_their_way_wait_behind_a_reported_queue() -> None:
    """A heartbeat is old news: once our requests there have ended, so has their part of the queue."""
    router = pair_of()
    report_blocks(router, "p1", LONG, 160)
    first = send(router, LONG)
    router.on_status(measured("p1", 1, num_queued_prompt_tokens=1800))
    assert chosen(router)[0] == {"p0"}
    end(router, first)
    assert chosen(router)[0] == {"p1"}


def test_the_faster_prefill_worker_wins() -> None:
    assert chosen(pair_of(measured("p1", prefill_tokens_per_s=2e4)))[0] == {"p1"}


def test_workers_without_measurements_count_like_the_others() -> None:
    router = pair_of(measured("p1", prefill_tokens_per_s=0.0), measured("d1", decode_step_s=0.0))
    assert chosen(router) == ({"p0", "p1"}, {"d0", "d1"})


def test_running_requests_and_slow_steps_keep_requests_away() -> None:
    assert chosen(pair_of(measured("d0", 8), measured("d1", 2)))[1] == {"d1"}
    assert chosen(pair_of(measured("d0", decode_step_s=0.03)))[1] == {"d1"}


def test_steps_that_grow_with_their_requests_are_learned() -> None:
    """d0 has more requests, but each of them makes d0's step only a little longer. On d1, each makes the step much
    longer."""
    router = pair_of()
    for running in (1, 2, 3, 4, 5, 6, 3):
        router.on_status(measured("d0", running, decode_step_s=0.01 + 0.0001 * running))
        router.on_status(measured("d1", running, decode_step_s=0.01 + 0.003 * running))
    router.on_status(measured("d0", 4, decode_step_s=0.0104))
    router.on_status(measured("d1", 2, decode_step_s=0.016))
    assert chosen(router)[1] == {"d0"}


def test_c59_a_steps_time_is_that_of_the_requests_which_it_holds() -> None:
    """With `prefill_first`, more requests may run than decode in one step. Here, at most eight decode in one step."""
    router = pair_of()
    for running in (1, 8, 30, 1, 40):
        seconds = 0.01 + 0.001 * min(running, 8)
        router.on_status(replace(measured("d0", running, decode_step_s=seconds), max_num_seqs=8))
        router.on_status(measured("d1", running, decode_step_s=0.01 + 0.001 * running))
    for name in ("d0", "d1"):
        assert router.estimate(name).decode_step.per_request_s == pytest.approx(0.001, rel=0.2), name


def test_a_prefix_hit_on_a_decode_worker_shortens_the_transfer() -> None:
    router = pair_of()
    for decode in ("d0", "d1"):
        for prefill in ("p0", "p1"):
            hand_over(router, prefill, decode, bytes_per_s=1e8)
    report_blocks(router, "d1", LONG, 1600)
    assert chosen(router)[1] == {"d1"}
    assert router.route(LONG).num_transfer_tokens == 400


def test_only_what_outlasts_the_prefill_counts_of_a_transfer() -> None:
    router = pair_of()
    for decode, rate in {"d0": 2e9, "d1": 9e9}.items():
        for prefill in ("p0", "p1"):
            hand_over(router, prefill, decode, bytes_per_s=rate)
    assert chosen(router)[1] == {"d0", "d1"}


def test_links_are_measured_by_pair() -> None:
    """p0 reaches d0 fast, and p1 d1; the other two ways are slow."""
    router = pair_of()
    for prefill, decode, rate in (("p0", "d0", 1e9), ("p0", "d1", 1e7), ("p1", "d0", 1e7), ("p1", "d1", 1e9)):
        hand_over(router, prefill, decode, bytes_per_s=rate)
    placements = [router.route(LONG) for _ in range(8)]
    assert {(placement.prefill, placement.decode) for placement in placements} <= {("p0", "d0"), ("p1", "d1")}


def test_links_of_a_worker_that_is_gone_are_forgotten() -> None:
    router = pair_of()
    for prefill in ("p0", "p1"):
        hand_over(router, prefill, "d0", bytes_per_s=1e7)
        hand_over(router, prefill, "d1", bytes_per_s=9e9)
    assert chosen(router)[1] == {"d1"}
    router.on_worker_lost("d0")
    router.on_status(measured("d0"))
    assert chosen(router)[1] == {"d0", "d1"}


def hand_over(router: Router, prefill: str, decode: str, bytes_per_s: float) -> None:
    placement = Placement(Mode.DISAGGREGATED, prefill, decode, num_transfer_tokens=1000)
    num_bytes = 100_000_000
    times = StageTimes(transfer_bytes=num_bytes, transfer_moving_s=num_bytes / bytes_per_s)
    router.measured(placement, times)


def test_blocks_that_will_run_short_cost_their_computation() -> None:
    router = pair_of(measured("d0", 20, free=150), measured("d1", 21, free=900))
    assert chosen(router)[1] == {"d1"}
    assert chosen(pair_of(measured("d0", 20, free=900), measured("d1", 21, free=900)))[1] == {"d0"}


def test_hits_are_found_at_any_block_size() -> None:
    router = pair_of(measured("p1", block_size=64))
    report_blocks(router, "p0", LONG, 160)
    report_blocks(router, "p1", LONG, 1024, block_size=64)
    assert router.route(LONG).num_prefill_tokens == 2000 - 1024
    assert chosen(router)[0] == {"p1"}


def test_another_salt_hits_nothing_and_a_whole_prompt_leaves_a_token_to_compute() -> None:
    router = pair_of()
    asked = ask(160, cache_salt="a")
    report_blocks(router, "p1", asked, 160)
    assert router.route(asked).num_prefill_tokens == 16
    assert router.route(ask(160, cache_salt="b")).num_prefill_tokens == 160
    assert router.route(ask(160)).num_prefill_tokens == 160


def test_c63_a_request_that_skips_the_cache_has_no_hits_for_a_router() -> None:
    router = pair_of()
    report_blocks(router, "p1", LONG, 1600)
    report_blocks(router, "d1", LONG, 1600)
    skipping = replace(LONG, skip_reading_prefix_cache=True)
    assert chosen(router) == ({"p1"}, {"d1"})
    assert chosen(router, skipping) == ({"p0", "p1"}, {"d0", "d1"})
    placement = router.route(skipping)
    assert (placement.num_prefill_tokens, placement.num_transfer_tokens) == (2000, 2000)
    assert router.num_tokens_to_compute(skipping) == {"p0": 2000, "p1": 2000}


def test_a_new_incarnation_and_a_lost_worker_have_no_blocks() -> None:
    router = pair_of()
    report_blocks(router, "p1", LONG, 1600)
    assert not router.lacks_kv_listing("p1")
    router.on_status(measured("p1", incarnation="second"))
    assert router.lacks_kv_listing("p1")
    assert chosen(router)[0] == {"p0", "p1"}
    report_blocks(router, "p1", LONG, 1600)
    router.on_worker_lost("p1")
    router.on_status(measured("p1", incarnation="second"))
    assert chosen(router)[0] == {"p0", "p1"}


def test_a_listing_lasts_while_the_role_changes() -> None:
    router = pair_of()
    report_blocks(router, "p1", LONG, 1600)
    router.on_status(measured("p1", role=WorkerRole.DECODE))
    assert router.route(LONG).decode == "p1"
    assert router.route(LONG).num_transfer_tokens == 400


def test_listings_are_wanted_only_where_they_decide() -> None:
    for policy, mode, is_wanted in (
        ("kv_aware", "local", True),
        ("least_loaded", "auto", True),
        ("least_loaded", "disaggregated", False),
        ("round_robin", "local", False),
    ):
        assert router_of(policy, mode, measured("d0")).lacks_kv_listing("d0") == is_wanted
    assert not pair_of().lacks_kv_listing("nobody")


def test_in_a_large_fleet_the_best_of_each_are_looked_at() -> None:
    names = [f"{role}{number}" for role in "pd" for number in range(3 * NUM_JOINT)]
    router = router_of("kv_aware", "disaggregated", *[measured(name) for name in names])
    report_blocks(router, "p20", LONG, 1600)
    report_blocks(router, "d21", LONG, 1600)
    for prefill in names[: 3 * NUM_JOINT]:
        hand_over(router, prefill, "d21", bytes_per_s=1e8)
    assert chosen(router) == ({"p20"}, {"d21"})


# auto


def auto(*statuses: WorkerStatus, **config: Any) -> Router:
    return pair_of(*statuses, mode="auto", **config)


def reason_for(router: Router, asked: RouteQuery = LONG) -> tuple[str, bool]:
    placement = router.route(asked)
    return (placement.reason, placement.is_fallback) if placement.mode is Mode.LOCAL else ("pair", False)


def test_short_prompts_are_computed_where_they_are_decoded() -> None:
    busy = [measured("d0", 4), measured("d1", 4)]
    assert reason_for(auto(*busy), ask(3)) == ("short prompt", False)
    assert reason_for(auto(*busy)) == ("pair", False)


def test_pairs_are_compared_once_and_not_at_all_if_every_decode_worker_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare, num_compared = KVAware.pair, count()
    monkeypatch.setattr(KVAware, "pair", lambda *args: (next(num_compared), compare(*args))[1])
    router = auto(measured("d0", 4), measured("d1", 4))
    assert reason_for(router) == ("pair", False)
    assert next(num_compared) == 1
    with pytest.raises(NoRoom, match="its caller holds its share"):
        router.route(replace(LONG, refusal_at=lambda _: NoRoom("its caller holds its share")))
    assert next(num_compared) == 2


def test_a_prompt_is_short_if_the_decode_worker_has_most_of_it() -> None:
    router = auto(measured("d0", 4), measured("d1", 4))
    report_blocks(router, "d1", LONG, 1984)
    placement = router.route(LONG)
    assert (placement.reason, placement.decode) == ("short prompt", "d1")
    assert placement.num_prefill_tokens == 16


def test_a_prompt_goes_local_while_prefill_workers_are_busy() -> None:
    router = auto(
        measured("d0", 2),
        measured("d1", 2),
        *[measured(name, 5, num_queued_prompt_tokens=100_000) for name in ("p0", "p1")],
    )
    assert reason_for(router) == ("busy prefill workers", False)


def test_prompts_of_a_burst_go_local_though_many_hand_overs_to_the_decode_worker_are_to_come() -> None:
    """A decode worker that waits for hand-overs is not busy. Those that come soon would be delayed, so they count."""
    router = router_of("kv_aware", "auto", measured("p0"), measured("d0", free=9999, total=9999))
    reasons = [send(router, LONG).reason or "pair" for _ in range(30)]
    assert 8 <= reasons.count("busy prefill workers") <= 12


@pytest.mark.parametrize(("num_running", "longest"), [(1, 200), (4, 50), (20, 10)])
def test_a_prompt_is_short_if_it_delays_all_answers_by_less_than_a_hand_over_costs(
    num_running: int, longest: int
) -> None:
    """A hand-over costs 5 ms. At 40,000 tokens a second, a token delays each answer by 25 us."""
    fast: dict[str, Any] = {"prefill_tokens_per_s": 40_000.0}
    workers = [measured("p0", **fast), measured("d0", num_running, **fast)]
    router = router_of("kv_aware", "auto", *workers)
    assert reason_for(router, ask(longest - 1)) == ("short prompt", False)
    assert reason_for(router, ask(longest + 1)) == ("pair", False)


@pytest.mark.parametrize(("told", "longest"), [(0, 128), (8192, 8192)])
def test_a_decode_worker_without_requests_computes_a_prompt_of_one_step(told: int, longest: int) -> None:
    """It delays no answer, is as fast as a prefill worker, and answers that come later wait for a step at most."""
    workers = [replace(measured(name), max_num_batched_tokens=told) for name in ("p0", "d0")]
    router = router_of("kv_aware", "auto", *workers)
    assert reason_for(router, ask(longest)) == ("idle decode worker", False)
    assert reason_for(router, ask(longest + 1)) == ("pair", False)
    send(router, ask(100))
    assert reason_for(router, ask(longest)) == ("pair", False)


def test_a_step_in_progress_counts_once() -> None:
    """The prompts on P are shorter than the new prompt, which waits for all of them, and for nothing else."""
    router = auto(measured("p0", 1, num_queued_prompt_tokens=100), measured("d0", 6))
    waiting, need = router._workers["p0"], Need(200, 1, {})
    assert router._costs.order_s(waiting, need) == router._costs.wait_s(waiting) == pytest.approx(0.01)


def test_a_short_prompt_does_not_wait_behind_one_long_prompt_and_so_stays_a_pair() -> None:
    """The prefill worker computes the short prompt first. In the order of arrival, the prompt would wait, and D alone
    would be better."""
    busy = [measured(name, 1, num_queued_prompt_tokens=30_000) for name in ("p0", "p1")]
    statuses = [*busy, measured("d0", 6), measured("d1", 6)]
    assert reason_for(auto(*statuses), ask(300)) == ("pair", False)
    by_arrival = Router(GatewayConfig(routing_mode="auto"), KEY, SchedulerConfig(policy="priority"))
    for one in statuses:
        by_arrival.on_status(one)
    assert reason_for(by_arrival, ask(300)) == ("busy prefill workers", False)


def test_a_short_prompt_goes_local_while_many_short_ones_wait() -> None:
    busy = [measured(name, 300, num_queued_prompt_tokens=30_000) for name in ("p0", "p1")]
    assert reason_for(auto(*busy, measured("d0", 6), measured("d1", 6)), ask(300)) == (
        "busy prefill workers",
        False,
    )


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "kv_aware"])
def test_a_configured_length_replaces_what_was_measured(policy: str) -> None:
    workers = [measured("p0"), measured("d0", 4)]
    router = router_of(policy, "auto", *workers, local_prefill_tokens=100)
    assert reason_for(router, ask(100)) == ("short prompt", False)
    assert reason_for(router, ask(101)) == ("pair", False)
    idle = router_of(policy, "auto", measured("p0"), measured("d0"), local_prefill_tokens=100)
    assert reason_for(idle, ask(100)) == ("short prompt", False)
    assert reason_for(idle, ask(101)) == ("pair", False)
    idle.on_status(measured("p0", 5, num_queued_prompt_tokens=100_000))
    assert reason_for(idle, ask(101)) == ("busy prefill workers", False)
    none_alive = router_of(policy, "auto", measured("d0"), local_prefill_tokens=100)
    assert reason_for(none_alive, ask(100)) == ("short prompt", False)
    assert reason_for(none_alive, ask(101)) == ("no prefill worker", True)


def test_cached_tokens_of_a_prompt_need_not_be_computed() -> None:
    router = pair_of()
    report_blocks(router, "p1", LONG, 160)
    assert router.num_tokens_to_compute(LONG) == {"p0": 2000, "p1": 1840}
    decode = [measured("d0"), measured("d1")]
    assert router_of("kv_aware", "disaggregated", *decode).num_tokens_to_compute(LONG) == {
        "d0": 2000,
        "d1": 2000,
    }
    assert router_of("round_robin", "disaggregated", *decode).num_tokens_to_compute(LONG) == {}, "unknown"
    assert router_of("kv_aware", "disaggregated").num_tokens_to_compute(LONG) == {}
