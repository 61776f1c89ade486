"""The router: which workers get a request, and which never do."""

from typing import Any

import pytest

from baton.config import GatewayConfig
from baton.errors import ConfigError, WorkerUnavailable
from baton.worker import WorkerRole, WorkerState
from gateway.routing.placement import Mode, NoRoom, Placement
from gateway.routing.policies import NUM_JOINT
from gateway.routing.router import Router
from tests.factories.routing import DISAGGREGATED, KEY, POLICIES, D, P, ask, end, router_of, send, status


def test_round_robin_takes_turns() -> None:
    router = router_of("round_robin", DISAGGREGATED, *P, *D)
    assert [router.route(ask()).decode for _ in range(4)] == ["d0", "d1", "d0", "d1"]


@pytest.mark.parametrize("policy", ["least_loaded", "kv_aware"])
def test_the_emptiest_is_taken_and_ties_take_turns(policy: str) -> None:
    router = router_of(policy, "local", status("d0", 3), status("d1", 1), status("d2", 1))
    assert [router.route(ask()).decode for _ in range(6)].count("d1") in (2, 3, 4)
    assert {router.route(ask()).decode for _ in range(6)} == {"d1", "d2"}


@pytest.mark.parametrize("policy", POLICIES)
def test_an_affinity_key_decides_between_equals(policy: str) -> None:
    decodes = [status(f"d{number}") for number in range(6)]
    router = router_of(policy, DISAGGREGATED, *P, *decodes)
    keys = [f"session {number}" for number in range(60)]

    def chosen() -> dict[str, tuple[str | None, str]]:
        placements = {key: router.route(ask(affinity_key=key)) for key in keys}
        return {key: (placement.prefill, placement.decode) for key, placement in placements.items()}

    before = chosen()
    assert chosen() == before
    assert {decode for _, decode in before.values()} == {worker.ref.name for worker in decodes}
    assert {prefill for prefill, _ in before.values()} == {"p0", "p1"}
    router.on_worker_lost("d3")
    after = chosen()
    assert {key for key in keys if after[key] != before[key]} == {
        key for key, (_, decode) in before.items() if decode == "d3"
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_only_placements_of_requests_without_a_key_take_turns(policy: str) -> None:
    """Otherwise, if requests with a key came regularly in between, the other requests would get only half of the
    workers."""
    router = router_of(policy, DISAGGREGATED, *P, *D)
    chosen = []
    for _ in range(4):
        router.route(ask(affinity_key="a"))
        with pytest.raises(WorkerUnavailable):
            router.route(ask(excluded={"d0", "d1"}))
        with pytest.raises(WorkerUnavailable):
            router.route(ask(mode=Mode.DISAGGREGATED, excluded={"p0", "p1"}))
        with pytest.raises(NoRoom):
            router.route(ask(refusal_at=lambda _: NoRoom("not here")))
        chosen.append(router.route(ask()).pair)
    assert chosen == [("p0", "d0"), ("p1", "d1")] * 2


@pytest.mark.parametrize("policy", ["least_loaded", "kv_aware"])
def test_an_affinity_key_does_not_outweigh_load(policy: str) -> None:
    router = router_of(policy, "local", *D)
    home = send(router, ask(affinity_key="a")).decode
    assert router.route(ask(affinity_key="a")).decode != home


@pytest.mark.parametrize("policy", ["least_loaded", "kv_aware"])
def test_legs_count_before_the_worker_tells_of_them(policy: str) -> None:
    router = router_of(policy, "local", *D)
    placement = Placement(Mode.LOCAL, None, "d0")
    router.sent("d0", placement)
    assert {router.route(ask()).decode for _ in range(4)} == {"d1"}
    router.ended("d0", placement)
    assert {router.route(ask()).decode for _ in range(4)} == {"d0", "d1"}


@pytest.mark.parametrize("policy", ["least_loaded", "kv_aware"])
def test_requests_of_other_gateways_count_beside_our_own(policy: str) -> None:
    """d0 reported three requests. One of them was ours, and has ended since. d1 reported two requests, both ours."""
    router = router_of(policy, "local", *D)
    ours = [Placement(Mode.LOCAL, None, name) for name in ("d0", "d1", "d1")]
    for placement in ours:
        router.sent(placement.decode, placement)
    router.on_status(status("d0", 4))
    router.on_status(status("d1", 2))
    router.ended("d0", ours[0])
    assert {router.route(ask()).decode for _ in range(4)} == {"d1"}
    more = Placement(Mode.LOCAL, None, "d1")
    router.sent("d1", more)
    router.sent("d1", Placement(Mode.LOCAL, None, "d1"))
    assert {router.route(ask()).decode for _ in range(4)} == {"d0"}


@pytest.mark.parametrize("policy", POLICIES)
def test_draining_and_lost_workers_get_no_requests(policy: str) -> None:
    router = router_of(policy, "local", *D, status("d2"))
    router.on_status(status("d0", state=WorkerState.DRAINING))
    router.on_worker_lost("d1")
    router.on_worker_lost("nobody")
    assert {router.route(ask()).decode for _ in range(4)} == {"d2"}
    router.on_status(status("d1"))
    assert {router.route(ask()).decode for _ in range(4)} == {"d1", "d2"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_changes_its_role_gets_requests_of_the_new_one(policy: str) -> None:
    router = router_of(policy, DISAGGREGATED, status("w0", role=WorkerRole.PREFILL), *P, *D)
    router.on_status(status("w0", state=WorkerState.DRAINING, role=WorkerRole.PREFILL))
    assert {router.route(ask()).prefill for _ in range(6)} == {"p0", "p1"}
    router.on_status(status("w0", role=WorkerRole.DECODE))
    placements = [router.route(ask()) for _ in range(6)]
    assert {placement.decode for placement in placements} == {"d0", "d1", "w0"}
    assert "w0" not in {placement.prefill for placement in placements}


def test_the_router_knows_which_workers_are_ready_and_which_drain() -> None:
    router = router_of("least_loaded", DISAGGREGATED, *P, *D)
    router.on_status(status("d0", state=WorkerState.DRAINING))
    router.on_status(status("p0", state=WorkerState.DRAINING, role=WorkerRole.PREFILL))
    router.on_worker_lost("p0")
    names = ("p0", "p1", "d0", "d1", "nobody")
    assert [name for name in names if router.ready_worker(name)] == ["p1", "d1"]
    assert [router.num_ready(role) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)] == [1, 1]
    assert [name for name in names if router.is_draining(name)] == ["d0"], "a lost worker drains no more"
    prefill, decode = WorkerRole.PREFILL, WorkerRole.DECODE
    assert [router.role_of(name) for name in names] == [None, prefill, decode, decode, None]


def test_nothing_is_kept_of_a_lost_worker_once_its_requests_have_ended() -> None:
    router = router_of("kv_aware", DISAGGREGATED, P[0], D[0])
    placement = send(router, ask())
    router.on_worker_lost("d0")
    assert router.num_sub_requests == {"p0": 1, "d0": 1}
    end(router, placement)
    assert router.num_sub_requests == {"p0": 0}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_may_ask_for_another_mode_than_the_default(policy: str) -> None:
    for default in (DISAGGREGATED, "auto"):
        placement = router_of(policy, default, *P, *D).route(ask(mode=Mode.LOCAL))
        assert (placement.mode, placement.prefill, placement.is_fallback) == (Mode.LOCAL, None, False)
        assert placement.reason == "asked for"
    for default in ("local", "auto"):
        placement = router_of(policy, default, *P, *D).route(ask(mode=Mode.DISAGGREGATED))
        assert placement.mode is Mode.DISAGGREGATED
        assert placement.prefill == "p0"
    assert router_of(policy, "local", *P, *D).route(ask()).reason == "configured"


@pytest.mark.parametrize("mode", [DISAGGREGATED, "auto"])
def test_c53_without_prefill_workers_a_default_falls_back_visibly_and_a_demand_fails(mode: str) -> None:
    for statuses, one in ((D, ask()), ([*P, *D], ask(without_prefill=True))):
        placement = router_of("round_robin", mode, *statuses).route(one)
        assert (placement.mode, placement.prefill, placement.is_fallback) == (Mode.LOCAL, None, True)
        assert placement.reason == "no prefill worker"
        with pytest.raises(WorkerUnavailable, match="requires one"):
            router_of("round_robin", mode, *statuses, require_disaggregated=True).route(one)
    with pytest.raises(WorkerUnavailable, match="requires one"):
        router_of("round_robin", mode, *D).route(ask(mode=Mode.DISAGGREGATED))


@pytest.mark.parametrize("policy", POLICIES)
def test_c42_a_pair_without_a_link_gets_no_request_while_there_is_another(policy: str) -> None:
    router = router_of(policy, DISAGGREGATED, *P, *D)
    avoided = {("p0", "d0"), ("p1", "d1")}
    pairs = {send(router, ask(avoided=avoided)).pair for _ in range(8)}
    assert pairs
    assert pairs <= {("p0", "d1"), ("p1", "d0")}
    assert send(router, ask(avoided=avoided, excluded={"d0"})).pair == ("p0", "d1")


def test_c42_the_best_workers_of_a_large_fleet_may_all_be_cut_off_from_each_other() -> None:
    near = [status(f"{kind}{number}") for kind in "pd" for number in range(NUM_JOINT)]
    far = [status("p-far", 50), status("d-far", 50)]
    router = router_of("kv_aware", DISAGGREGATED, *near, *far)
    names = [one.ref.name for one in near]
    avoided = {(p, d) for p in names for d in names}
    pair = router.route(ask(avoided=avoided)).pair
    assert pair is not None
    assert {"p-far", "d-far"} & set(pair)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", [DISAGGREGATED, "auto"])
def test_c53_where_no_pair_has_a_link_a_default_falls_back_and_a_demand_tries_one(
    policy: str, mode: str
) -> None:
    avoided = {(p, d) for p in ("p0", "p1") for d in ("d0", "d1")}
    placement = router_of(policy, mode, *P, *D).route(ask(avoided=avoided))
    assert (placement.mode, placement.is_fallback) == (Mode.LOCAL, True)
    assert placement.reason == "no link to a prefill worker"
    required = router_of(policy, mode, *P, *D, require_disaggregated=True)
    assert required.route(ask(avoided=avoided)).pair in avoided
    demand = ask(avoided=avoided, mode=Mode.DISAGGREGATED)
    assert router_of(policy, mode, *P, *D).route(demand).pair in avoided


def test_c53_what_is_local_by_choice_is_no_fallback_and_may_be_had_where_fallback_is_forbidden() -> None:
    router = router_of("kv_aware", "auto", *D, require_disaggregated=True)
    placement = router.route(ask(mode=Mode.LOCAL))
    assert (placement.is_fallback, placement.reason) == (False, "asked for")


@pytest.mark.parametrize("policy", POLICIES)
def test_excluded_workers_are_not_asked_again(policy: str) -> None:
    router = router_of(policy, DISAGGREGATED, *P, *D)
    for _ in range(4):
        placement = router.route(ask(excluded={"p0", "d1"}))
        assert (placement.prefill, placement.decode) == ("p1", "d0")
    with pytest.raises(WorkerUnavailable, match="no decode worker"):
        router.route(ask(excluded={"d0", "d1"}))


def test_the_same_words_lead_to_the_same_choices() -> None:
    def choices() -> list[Placement]:
        router = router_of("kv_aware", DISAGGREGATED, *P, status("p2"), *D, status("d2"))
        return [send(router, ask(number)) for number in range(1, 40)]

    assert choices() == choices()


# configuration


def test_by_default_the_router_chooses_the_mode() -> None:
    assert GatewayConfig().routing_mode == "auto"
    assert GatewayConfig(local_prefill_tokens=9).local_prefill_tokens == 9


@pytest.mark.parametrize("policy", POLICIES)
def test_c53_whoever_only_requires_disaggregation_gets_hand_overs_alone(policy: str) -> None:
    """This holds even where `auto` would choose the decode worker, because it is idle, and the prompt is one token."""
    assert router_of(policy, "auto", *P, *D).route(ask(1)).reason == "idle decode worker"
    config = GatewayConfig(routing_policy=policy, require_disaggregated=True)  # type: ignore[arg-type]
    router = Router(config, KEY)
    for one in (*P, *D):
        router.on_status(one)
    for num_tokens in (1, 50, 3_000):
        assert send(router, ask(num_tokens)).mode is Mode.DISAGGREGATED
    assert set(router.num_tokens_to_compute(ask())) <= {"p0", "p1"}
    with pytest.raises(WorkerUnavailable, match="requires one"):
        router.route(ask(excluded={"p0", "p1"}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"local_prefill_tokens": 9, "routing_mode": "disaggregated"},
            "local_prefill_tokens .* needs routing_mode",
        ),
        ({"local_prefill_tokens": 9, "routing_mode": "local"}, "local_prefill_tokens .* needs routing_mode"),
        (
            {"require_disaggregated": True, "routing_mode": "local"},
            "require_disaggregated contradicts routing_mode",
        ),
        (
            {"require_disaggregated": True, "local_prefill_tokens": 9},
            r"so local_prefill_tokens \(9\) has no effect",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GatewayConfig().with_values("test", **values)


@pytest.mark.parametrize(
    ("configured", "asked", "computing"),
    [
        ("disaggregated", None, {"p0", "p1"}),
        ("disaggregated", Mode.LOCAL, {"d0", "d1"}),
        ("local", None, {"d0", "d1"}),
        ("auto", None, {"p0", "p1", "d0", "d1"}),
        ("auto", Mode.DISAGGREGATED, {"p0", "p1"}),
    ],
)
def test_which_workers_may_compute_a_prompt_and_how_much_of_it(
    configured: str, asked: Mode | None, computing: set[str]
) -> None:
    router = router_of("kv_aware", configured, *P, *D)
    assert router.num_tokens_to_compute(ask(100, mode=asked)) == dict.fromkeys(computing, 100)
