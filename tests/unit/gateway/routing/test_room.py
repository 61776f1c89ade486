"""Credits: nothing is prefilled that no decode worker can take, and no worker is left out for ever."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from baton.block_hash import block_hashes
from baton.errors import RequestError, WorkerUnavailable
from baton.kv_groups import KVGroups
from baton.messages.request_plane import KVEvents
from baton.worker import RequestCounts, WorkerStatus
from gateway.routing.placement import AwaitsPrompts, Mode, NoRoom, NoSlot, Placement
from gateway.routing.router import Router
from gateway.routing.worker_estimate import WorkerEstimate
from tests.factories.routing import (
    DISAGGREGATED,
    KEY,
    POLICIES,
    D,
    P,
    ask,
    end,
    router_of,
    send,
    status,
)


def hear_with_one_of_ours(router: Router, *statuses: WorkerStatus) -> None:
    """Reports of decode workers, each with one request of this gateway that has no blocks yet."""
    for one in statuses:
        router.on_status(one)
        router.sent(one.ref.name, Placement(Mode.LOCAL, None, one.ref.name))
        router.on_status(one)


def test_nothing_goes_to_a_decode_worker_without_blocks_for_it() -> None:
    for policy in POLICIES:
        router = router_of(policy, DISAGGREGATED, *P)
        hear_with_one_of_ours(router, status("d0", 1, free=5), status("d1", 1, free=9))
        assert {router.route(ask(100)).decode for _ in range(4)} == {
            "d1"
        }  # 7 blocks, and one for each that runs
        with pytest.raises(NoRoom, match="200 tokens"):
            router.route(ask(200))


@pytest.mark.parametrize(("num_slots", "num_fitting"), [(1, 3), (8, 10), (64, 80)])
def test_a_few_requests_more_than_a_decode_worker_has_slots_are_sent_to_it(
    num_slots: int, num_fitting: int
) -> None:
    """Requests of another gateway count, too. With more requests, answers would stall after token 0 until a
    slot is free."""
    router = router_of("kv_aware", DISAGGREGATED, P[0])
    router.on_status(replace(status("d0", running=1), max_num_seqs=num_slots))
    ours = [send(router, ask(3)) for _ in range(num_fitting - 1)]
    with pytest.raises(NoSlot):
        router.route(ask(3))
    end(router, ours[0])
    send(router, ask(3))


@pytest.mark.parametrize(("num_running", "num_loads", "error"), [(64, 0, NoSlot), (1, 63, AwaitsPrompts)])
def test_slots_that_wait_for_prompts_are_no_reason_for_more_decode_workers(
    num_running: int, num_loads: int, error: type[NoSlot]
) -> None:
    """With a long queue on the prefill workers, the planner started decode workers, which do not help."""
    router = router_of("kv_aware", DISAGGREGATED, P[0])
    router.on_status(replace(status("d0"), max_num_seqs=64))
    for _ in range(80):
        send(router, ask(3))
    router.on_status(replace(status("d0", num_running, waiting=16, remote=num_loads), max_num_seqs=64))
    with pytest.raises(NoSlot) as caught:
        router.route(ask(3))
    assert caught.type is error


def test_a_request_takes_the_blocks_of_every_kv_group_but_not_those_that_left_a_window() -> None:
    """200 tokens and the next: 13 rows of two groups, of which 10 have left the window. The running request may need
    the next row of both.
    """
    groups = KVGroups(1, 1, 32)
    for num_free, has_room in ((18, True), (17, False)):
        windowed = replace(status("d0", free=num_free), kv_groups=groups)
        router = router_of("kv_aware", DISAGGREGATED, P[0])
        router.on_status(windowed)
        router.sent("d0", Placement(Mode.LOCAL, None, "d0"))
        router.on_status(replace(windowed, requests=RequestCounts(1, 0, 0)))
        if has_room:
            assert router.route(ask(200)).num_decode_blocks == 13 + 3
            continue
        with pytest.raises(NoRoom):
            router.route(ask(200))


def test_a_sent_request_takes_blocks_before_the_worker_reports_it() -> None:
    router = router_of("kv_aware", DISAGGREGATED, P[0], status("d0", free=20))
    first = send(router, ask(127))  # 8 blocks
    send(router, ask(127))  # 8 of 12 - 1
    with pytest.raises(NoRoom):
        router.route(ask(127))
    router.on_status(status("d0", remote=2, free=4))
    with pytest.raises(NoRoom):
        router.route(ask(127))
    end(router, first)
    router.on_status(status("d0", running=1, free=12))
    send(router, ask(127))


def test_blocks_of_an_ended_request_are_room_before_the_worker_reports_them() -> None:
    """A request returns no block that others may share, and none of a sub-request that the worker never reported."""
    for num_found, has_room in ((0, True), (64, False)):
        router = router_of("kv_aware", DISAGGREGATED, P[0], status("d0", free=20))
        first = send(router, ask(127))
        if num_found:
            stored = b"".join(each[:8] for each in block_hashes(tuple(range(num_found)), 16, KEY))
            router.on_kv_events("d0", KVEvents(0, True, b"", stored))
        second = send(router, ask(127))
        router.on_status(status("d0", running=2, free=4))
        end(router, first)
        if has_room:
            send(router, ask(127))
            end(router, second)
            continue
        with pytest.raises(NoRoom):
            router.route(ask(127))
    router.on_status(status("d0", running=1, free=4))
    unheard = send(router, ask(20))
    end(router, unheard)
    with pytest.raises(NoRoom):
        router.route(ask(127))


def test_a_policy_that_follows_no_caches_waits_for_the_workers_word() -> None:
    router = router_of("least_loaded", DISAGGREGATED, P[0], status("d0", free=20))
    first, _ = send(router, ask(127)), send(router, ask(127))
    router.on_status(status("d0", running=2, free=4))
    end(router, first)
    with pytest.raises(NoRoom):
        router.route(ask(127))
    router.on_status(status("d0", running=1, free=12))
    send(router, ask(127))


def test_a_report_from_before_a_request_does_not_make_room() -> None:
    router = router_of("kv_aware", DISAGGREGATED, P[0], status("d0", free=20))
    send(router, ask(127))
    send(router, ask(127))
    router.on_status(status("d0", remote=1, free=12))  # written before the second one arrived
    with pytest.raises(NoRoom):
        router.route(ask(127))
    router.on_status(status("d0", remote=1, waiting=1, free=12))  # arrived, but has no blocks yet
    with pytest.raises(NoRoom):
        router.route(ask(127))


def test_an_idle_worker_gets_one_request_whatever_blocks_it_reports() -> None:
    router = router_of("kv_aware", DISAGGREGATED, P[0], status("d0", free=0))
    send(router, ask(127))
    with pytest.raises(NoRoom):
        router.route(ask(1))
    router.on_status(status("d0", running=1, free=0))
    with pytest.raises(NoRoom):
        router.route(ask(1))


def test_each_gateway_may_have_one_request_in_the_queue_of_a_worker_that_others_fill() -> None:
    """Otherwise a gateway that learns of free room later than others would never get any."""
    router = router_of("kv_aware", DISAGGREGATED, P[0], status("d0", 3, free=0), status("d1", 3, free=0))
    placements = [send(router, ask(127)), send(router, ask(127))]
    assert {placement.decode for placement in placements} == {"d0", "d1"}
    with pytest.raises(NoRoom):
        router.route(ask(1))
    router.on_status(status("d0", 3, remote=1, free=9))
    with pytest.raises(NoRoom):
        router.route(ask(127))
    end(router, placements[0])
    assert send(router, ask(127)).decode == "d0"


def test_a_worker_with_room_comes_before_one_without_our_requests() -> None:
    router = router_of("kv_aware", DISAGGREGATED, P[0])
    hear_with_one_of_ours(router, status("d0", 1, free=20))
    router.on_status(status("d1", 1, free=0))
    assert router.route(ask(127)).decode == "d0"


def test_a_missing_prefill_worker_is_reported_before_missing_room() -> None:
    router = router_of("kv_aware", DISAGGREGATED, status("d0", 1, free=0), require_disaggregated=True)
    with pytest.raises(WorkerUnavailable):
        router.route(ask())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_is_too_small_is_skipped_while_another_can_serve(policy: str) -> None:
    small, large = status("d0", total=4, free=4), status("d1", 1, free=20)
    router = router_of(policy, DISAGGREGATED, *P)
    hear_with_one_of_ours(router, small, large)
    assert {router.route(ask(100)).decode for _ in range(4)} == {"d1"}
    router.on_status(status("d1", 1, free=5))
    with pytest.raises(NoRoom):
        router.route(ask(100))


def test_a_request_that_fits_no_worker_does_not_wait_for_room() -> None:
    """The request's worker refuses it with the reason. In the queue, it would hold up requests that have room."""
    router = router_of("kv_aware", DISAGGREGATED, P[0])
    hear_with_one_of_ours(router, status("d0", 3, total=9, free=2))
    with pytest.raises(NoRoom):
        router.route(ask(100))
    assert router.route(ask(160)).decode == "d0"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", [DISAGGREGATED, "auto"])
def test_a_prefill_worker_that_is_too_small_is_skipped_while_another_can_serve(
    policy: str, mode: str
) -> None:
    """With the token that its worker samples, the prompt needs 7 blocks."""
    small, busy = status("p0", total=6, free=6), [status(name, 3) for name in ("d0", "d1")]
    router = router_of(policy, mode, small, P[1], *busy)
    assert {router.route(ask(100)).prefill for _ in range(4)} == {"p1"}
    assert {router.route(ask(95, mode=Mode.DISAGGREGATED)).prefill for _ in range(4)} == {"p0", "p1"}


@pytest.mark.parametrize("mode", [DISAGGREGATED, "auto"])
def test_a_prompt_that_fits_no_prefill_worker_is_computed_by_the_decode_worker(mode: str) -> None:
    router = router_of("kv_aware", mode, status("p0", total=6, free=6), *D)
    placement = router.route(ask(100))
    assert (placement.mode, placement.is_fallback) == (Mode.LOCAL, True)
    assert placement.reason == "no prefill worker"


def test_a_prefill_worker_refuses_a_prompt_that_fits_none_if_the_request_requires_one() -> None:
    """Waiting would not help, and the worker says what its limit is."""
    small = status("p0", total=6, free=6)
    assert router_of("kv_aware", "auto", small, *D).route(ask(100, mode=Mode.DISAGGREGATED)).prefill == "p0"
    required = router_of("kv_aware", "auto", small, *D, require_disaggregated=True)
    assert required.route(ask(100)).prefill == "p0"


@pytest.mark.parametrize("role", ["p", "d"])
def test_a_worker_that_is_too_small_does_not_stand_in_for_one_that_refused_the_request(role: str) -> None:
    """The worker that is too small would refuse the request for good, although the other one may have room soon."""
    others = [one for one in (*P, *D) if not one.ref.name.startswith(role)]
    router = router_of(
        "kv_aware", DISAGGREGATED, status(f"{role}0", total=6, free=6), status(f"{role}1"), *others
    )
    with pytest.raises(WorkerUnavailable):
        router.route(ask(100, mode=Mode.DISAGGREGATED, excluded={f"{role}1"}))


def refuses(*names: str) -> Callable[[str], RequestError | None]:
    return lambda decode: NoRoom(f"not at {decode}") if decode in names else None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_query_may_refuse_decode_workers_with_room(policy: str) -> None:
    router = router_of(policy, DISAGGREGATED, *P, *D)
    pairs = [router.route(ask(refusal_at=refuses("d0"))).pair for _ in range(4)]
    assert pairs == [("p0", "d1"), ("p1", "d1")] * 2, "each is one turn"
    with pytest.raises(NoRoom, match="not at d"):
        router.route(ask(refusal_at=refuses("d0", "d1")))
    router = router_of(policy, DISAGGREGATED, *P)
    hear_with_one_of_ours(router, status("d0", 1, free=20), status("d1", 1, free=5))
    with pytest.raises(NoRoom, match="not at d0"):
        router.route(ask(100, refusal_at=refuses("d0")))
    router = router_of(policy, DISAGGREGATED, *P)
    for worker in (status("d0", 1, free=20), status("d1", 60, free=0)):  # others have filled d1
        router.on_status(worker)
    with pytest.raises(NoRoom, match="not at d0"):
        router.route(ask(100, refusal_at=refuses("d0")))


def test_the_end_of_a_request_is_compared_with_no_other_prompt_on_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker has hundreds of requests, which may all end at once."""
    look, num_looks = WorkerEstimate._num_hit_blocks, count()
    monkeypatch.setattr(WorkerEstimate, "_num_hit_blocks", lambda *args: (next(num_looks), look(*args))[1])
    router = router_of("kv_aware", DISAGGREGATED, P[0], D[0])
    placements = [send(router, ask(100)) for _ in range(9)]
    router.on_status(status("d0", 9))
    for placement in placements:
        end(router, placement)
    assert next(num_looks) == 2 * 9, "once at each worker"
