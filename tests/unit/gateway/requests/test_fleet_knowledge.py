"""FleetKnowledge: what the gateway learns from workers' reports as time passes."""

from dataclasses import replace

import pytest

from baton.request import FinishReason, RequestOutput, StageTimes
from gateway.requests.attempt import Attempt
from gateway.requests.fleet_knowledge import FleetKnowledge
from gateway.routing.placement import Mode, Placement
from gateway.routing.prefill_times import MEMORY_S, MIN_SEEN, SHARE
from tests.factories.routing import router_of
from tests.unit.gateway.routing.test_kv_aware import chosen, hand_over, measured


def test_a_decode_worker_that_was_slow_before_it_became_idle_is_tried_again() -> None:
    """Its reports repeat the time of its last steps, so it would never get a request that shows its present speed."""
    router, number = router_of("kv_aware", "disaggregated", measured("p0")), 0
    knowledge = FleetKnowledge(router)

    def report_for(seconds: float, slow_s: float) -> set[str]:
        """Reports every half second; d1 computes all the time. Returns the decode workers that get requests."""
        nonlocal number
        for _ in range(int(seconds * 2)):
            number += 1
            knowledge.on_report(measured("d0", decode_step_s=slow_s), number / 2)
            knowledge.on_report(measured("d1", 1, decode_step_s=0.01), number / 2)
        return chosen(router)[1]

    assert report_for(MEMORY_S - 1, 0.1) == {"d1"}
    assert report_for(16, 0.1) == {"d0"}, "it has no requests"
    assert report_for(1, 0.09) == {"d1"}, "it is still slow"


def test_how_long_prompts_take_is_learned_from_first_tokens_alone() -> None:
    router = router_of("kv_aware", "disaggregated", measured("p0"), measured("d0"))
    knowledge, attempt = FleetKnowledge(router), Attempt("r.0", Placement(Mode.DISAGGREGATED, "p0", "d0"), 0)
    knowledge.on_report(measured("p0"), 0.0)
    no_first_tokens = [
        (1, (7,), 2.0),
        (0, (), 2.0),
        (0, (7,), 0.0),
    ]  # the last one from a worker that got the KV
    for first_position, token_ids, prefill_s in no_first_tokens * MIN_SEEN + [(0, (7,), 2.0)] * MIN_SEEN:
        assert knowledge.prefill_times.least_s({"p0": 90_000}, 0.0) == 0.0
        output = RequestOutput(
            request_id="r.0",
            first_position=first_position,
            token_ids=token_ids,
            stage_times=StageTimes(prefill_s=prefill_s),
        )
        knowledge.on_stage_times(attempt, "p0", output, 90_000, 0.0)
    assert knowledge.prefill_times.least_s({"p0": 90_000}, 0.0) == SHARE * 2.0


@pytest.mark.parametrize("former", [None, "p0", "d0", "lost p0"])
def test_the_link_of_a_worker_says_nothing_about_that_of_its_successor(former: str | None) -> None:
    router = router_of("kv_aware", "disaggregated", measured("p0"), measured("d0"), measured("d1"))
    hand_over(router, "p0", "d1", bytes_per_s=9e9)
    knowledge = FleetKnowledge(router)
    placement = Placement(Mode.DISAGGREGATED, "p0", "d0", num_transfer_tokens=1000)
    refs = {name: status.ref for name in ("p0", "d0") if (status := measured(name))}
    if former in refs:
        refs[former] = replace(refs[former], incarnation="the former one")
    elif former is not None:
        router.on_worker_lost("p0")  # while the decode worker continues
    attempt = Attempt("r.0", placement, 0, refs=refs)
    slow = StageTimes(transfer_bytes=100_000_000, transfer_moving_s=10.0)  # 1e7 bytes a second
    end = RequestOutput(request_id="r.0", first_position=0, finish_reason=FinishReason.STOP, stage_times=slow)
    knowledge.on_stage_times(attempt, "d0", end, 1000, 0.0)
    router.on_status(measured("p0"))
    assert chosen(router)[1] == ({"d1"} if former is None else {"d0", "d1"})
