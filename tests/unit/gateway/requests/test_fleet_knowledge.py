"""FleetKnowledge: what the gateway learns from workers' reports as time passes."""

from gateway.requests.fleet_knowledge import FleetKnowledge
from gateway.routing.prefill_times import MEMORY_S
from tests.unit.gateway.routing.test_kv_aware import chosen, measured
from tests.unit.gateway.routing.test_router import router_of


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
            knowledge.on_report(measured("d1", 1, decode_step_s=0.01 + number * 1e-6), number / 2)
        return chosen(router)[1]

    assert report_for(MEMORY_S - 1, 0.1) == {"d1"}
    assert report_for(16, 0.1) == {"d0"}, "it has no requests"
    assert report_for(1, 0.09) == {"d1"}, "it is still slow"
