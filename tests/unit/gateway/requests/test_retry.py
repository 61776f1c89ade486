"""What follows a failed attempt: what counts against it, where it does not go again, when it is given up."""

from dataclasses import replace

import pytest

from baton.config import GatewayConfig
from baton.errors import Overloaded, RequestError, WorkerUnavailable
from baton.request import OnPreemption
from baton.sampling import SamplingParams
from baton.worker import WorkerState
from gateway.requests.attempt import Attempt, AttemptFailure, Cause
from gateway.requests.retry import MAX_ATTEMPTS, MAX_FAILURES, MAX_LOSSES, LoadFailurePolicy, RetryState
from gateway.routing.placement import Mode, NoRoom, Placement, RouteQuery
from gateway.routing.router import Router
from tests.factories.dispatching import make_request
from tests.factories.routing import status


class Fleet:
    """The workers of a router, which gets their heartbeats."""

    def __init__(self, *names: str) -> None:
        config = GatewayConfig(routing_policy="round_robin", routing_mode="disaggregated")
        self.router = Router(config, b"")
        for name in names:
            self.on_heartbeat(name)

    def on_heartbeat(self, name: str, incarnation: int = 1, state: WorkerState = WorkerState.READY) -> None:
        """Workers whose names begin with p prefill."""
        self.router.on_status(status(name, state=state, incarnation=incarnation))

    def lose(self, name: str) -> None:
        self.router.on_worker_lost(name)


class Trip:
    """Drives a request from attempt to attempt; `num_tokens` is what the client has."""

    def __init__(
        self,
        fleet: Fleet,
        policy: LoadFailurePolicy = "retry",
        mode: Mode | None = None,
        *,
        require_disaggregated: bool = False,
    ) -> None:
        self.fleet = fleet
        request = make_request(sampling_params=SamplingParams(max_tokens=1_000), mode=mode)
        self.retry = RetryState(
            request, fleet.router, policy, 0.0, require_disaggregated=require_disaggregated
        )
        self.num_tokens = 0

    def begin(self, now: float = 0.0) -> Attempt:
        placement = self.retry.route((7,) * self.num_tokens)
        if isinstance(placement, RequestError):
            raise placement
        return self.retry.begin(placement, "id", self.num_tokens, now)

    def fail(
        self,
        cause: Cause,
        *,
        brings: int = 0,
        prompt: bool = False,
        worker: str | None = None,
        began_at: float = 0.0,
        now: float = 1.0,
    ) -> str | None:
        """Runs one attempt, which fails. Returns the error that ends the request, or None."""
        attempt = self.begin(began_at)
        self.num_tokens += brings
        placement = attempt.placement
        whose = worker or (placement.prefill if prompt and placement.prefill else placement.decode)
        failure = AttemptFailure(whose, cause, "it happened", is_prompt_lost=prompt)
        error = self.retry.on_failure(attempt, failure, self.num_tokens, now)
        return None if error is None else str(error)


def test_failures_in_a_row_end_it_and_a_new_token_forgives_them() -> None:
    trip = Trip(Fleet("d0"))
    for _ in range(3):
        assert [trip.fail(Cause.FAILED) for _ in range(MAX_FAILURES - 1)] == [None] * (MAX_FAILURES - 1)
        assert trip.fail(Cause.FAILED, brings=1) is None
    ends = [trip.fail(Cause.FAILED) for _ in range(MAX_FAILURES)]
    assert ends[-1] == f"gave up after {trip.retry.num_attempts} attempt(s): it happened"


def test_the_token_that_a_prefill_worker_brings_is_no_progress() -> None:
    trip = Trip(Fleet("p0", "p1", "p2", "d0"), mode=Mode.DISAGGREGATED)
    ends = [trip.fail(Cause.FAILED, brings=1, prompt=True) for _ in range(MAX_FAILURES)]
    assert ends[-1] is not None
    trip = Trip(Fleet("p0", "d0"), mode=Mode.DISAGGREGATED)
    assert [trip.fail(Cause.FAILED, brings=2, prompt=True) for _ in range(MAX_FAILURES)][-1] is None


def test_losses_count_apart_and_all_are_bounded() -> None:
    trip = Trip(Fleet("d0"))
    ends = [trip.fail(Cause.LOST) for _ in range(MAX_LOSSES)]
    assert ends[:-1] == [None] * (MAX_LOSSES - 1)
    assert ends[-1] is not None
    trip = Trip(Fleet("d0"))
    ends = [trip.fail(Cause.LOST, brings=5) for _ in range(MAX_ATTEMPTS)]
    assert ends[:-1] == [None] * (MAX_ATTEMPTS - 1)
    assert ends[-1] is not None, "the request ends every worker, each time at a later token"


@pytest.mark.parametrize("cause", [Cause.GIVEN_BACK, Cause.REFUSED])
def test_given_back_and_refused_attempts_do_not_count(cause: Cause) -> None:
    fleet = Fleet("d0")
    trip = Trip(fleet, policy="fail")
    for _ in range(2 * MAX_ATTEMPTS):
        assert trip.fail(cause) is None
        fleet.on_heartbeat("d0")


def test_a_worker_that_failed_a_request_is_avoided_until_its_next_incarnation_or_if_no_other_is_left() -> (
    None
):
    fleet = Fleet("d0", "d1", "d2")
    trip = Trip(fleet)
    trip.fail(Cause.FAILED, brings=1, worker="d0")
    assert {trip.begin().placement.decode for _ in range(6)} == {"d1", "d2"}
    fleet.on_heartbeat("d0", incarnation=2)
    assert "d0" in {trip.begin().placement.decode for _ in range(6)}
    fleet.on_heartbeat("d0", incarnation=1)
    fleet.lose("d1")
    fleet.lose("d2")
    assert trip.begin().placement.decode == "d0"


def test_a_lost_worker_counts_like_any_other_after_its_next_heartbeat() -> None:
    fleet = Fleet("d0")
    trip = Trip(fleet)
    trip.fail(Cause.LOST, brings=1)
    fleet.lose("d0")
    with pytest.raises(WorkerUnavailable):
        trip.begin()
    fleet.on_heartbeat("d0")
    assert trip.begin().placement.decode == "d0"


def test_a_worker_that_refused_a_request_is_tried_again_after_its_next_heartbeat() -> None:
    fleet = Fleet("d0", "d1")
    trip = Trip(fleet)
    trip.fail(Cause.REFUSED, worker="d0")
    assert {trip.begin().placement.decode for _ in range(4)} == {"d1"}
    trip.fail(Cause.REFUSED, worker="d1")
    with pytest.raises(NoRoom, match="it happened"):
        trip.begin()
    fleet.on_heartbeat("d0")
    assert trip.begin().placement.decode == "d0"


def test_c56_a_suspect_goes_where_no_other_suspect_has_its_turn() -> None:
    fleet = Fleet("d0", "d1")
    fleet.router.on_status(replace(status("d0"), takes_suspects=False))
    trip = Trip(fleet)
    placements = [trip.retry.route((), is_suspect=True) for _ in range(4)]
    assert {placement.decode for placement in placements if isinstance(placement, Placement)} == {"d1"}


def test_c53_the_prompt_is_computed_by_the_decode_worker_after_two_failures_unless_that_is_forbidden() -> (
    None
):
    trip = Trip(Fleet("p0", "p1", "p2", "d0"))
    trip.fail(Cause.FAILED, prompt=True)
    assert trip.begin().placement.mode is Mode.DISAGGREGATED
    trip.fail(Cause.FAILED, prompt=True)
    assert trip.begin().placement.mode is Mode.LOCAL
    fleet = Fleet("p0", "p1", "p2", "d0")
    for trip in (Trip(fleet, mode=Mode.DISAGGREGATED), Trip(fleet, require_disaggregated=True)):
        for _ in range(2):
            trip.fail(Cause.FAILED, prompt=True)
        assert trip.begin().placement.mode is Mode.DISAGGREGATED


@pytest.mark.parametrize(
    ("policy", "require_disaggregated", "recomputes"),
    [("recompute", False, True), ("recompute", True, False), ("retry", False, False)],
)
def test_c53_a_decode_worker_computes_a_lost_prompt_itself_only_by_policy_and_unless_that_is_forbidden(
    policy: LoadFailurePolicy, require_disaggregated: bool, recomputes: bool
) -> None:
    trip = Trip(Fleet("p0", "d0"), policy, require_disaggregated=require_disaggregated)
    assert trip.begin().decode_recomputes is recomputes


def test_the_router_learns_what_the_request_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    queries: list[RouteQuery] = []
    router = Fleet("d0").router
    monkeypatch.setattr(router, "num_tokens_to_compute", queries.append)
    request = make_request(cache_salt="salt", affinity_key="key", skip_reading_prefix_cache=True)
    RetryState(request, router, "retry", 0.0).num_tokens_to_compute()
    (query,) = queries
    assert (query.token_ids, query.max_new_tokens) == ((1, 2, 3), 3)
    assert (query.cache_salt, query.affinity_key) == ("salt", "key")
    assert query.skip_reading_prefix_cache


def test_c34_under_the_policy_fail_a_lost_prompt_ends_it_but_not_one_that_was_given_back() -> None:
    assert Trip(Fleet("p0", "d0"), policy="fail").fail(Cause.FAILED, prompt=True) is not None
    assert Trip(Fleet("p0", "d0"), policy="fail").fail(Cause.GIVEN_BACK, prompt=True) is None
    assert Trip(Fleet("p0", "d0"), policy="fail").fail(Cause.LOST, brings=5) is None


def test_the_time_to_find_a_place_restarts_with_a_workers_progress() -> None:
    trip = Trip(Fleet("d0", "d1"))
    trip.fail(Cause.REFUSED, worker="d0", began_at=5.0, now=5.0)
    assert trip.retry.seeking_since == 0.0
    trip.fail(Cause.GIVEN_BACK, worker="d1", brings=1, now=6.0)
    assert trip.retry.seeking_since == 6.0
    error = trip.retry.too_late(NoRoom("full"), 30.0, retry_after_s=7.0)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 7.0
    error = trip.retry.too_late(WorkerUnavailable("nobody is there"), 30.0, retry_after_s=7.0)
    assert str(error) == "nobody is there; waited 30 s for a worker; before that, it happened"


def test_time_queued_at_a_worker_that_gives_a_request_back_does_not_shorten_its_search() -> None:
    trip = Trip(Fleet("d0", "d1"))
    trip.fail(Cause.GIVEN_BACK, worker="d0", began_at=2.0, now=100.0)
    assert trip.retry.seeking_since == 98.0, "it had looked for 2 s"


def test_c36_blocks_are_given_back_only_where_somebody_may_have_more_and_not_for_ever() -> None:
    fleet = Fleet("d0")
    trip = Trip(fleet)
    assert trip.begin().on_preemption is OnPreemption.RESUME
    fleet.on_heartbeat("p0")
    assert trip.begin().on_preemption is OnPreemption.GIVE_BACK
    fleet.lose("p0")
    fleet.on_heartbeat("d1")
    for _ in range(2):
        assert trip.begin().on_preemption is OnPreemption.GIVE_BACK
        trip.fail(Cause.GIVEN_BACK)
        fleet.on_heartbeat("d0")
        fleet.on_heartbeat("d1")
    assert trip.begin().on_preemption is OnPreemption.RESUME
