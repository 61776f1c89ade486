"""Requests that continue elsewhere after they lose their blocks: behaviours 9, 36 and 51."""

from collections.abc import Callable
from typing import Any

import pytest

from baton.kv import TransferRole
from baton.request import ErrorKind, FinishReason, OnPreemption, RequestOutput
from baton.step import FailedKV, KVConnectorOutput
from scheduler import Request, RequestStatus
from tests.factories.driving import Driver
from tests.factories.scheduling import (
    EOS,
    FakeConnector,
    FakeRunner,
    failed,
    flatten,
    make_request,
    make_scheduler,
    received,
    run_step,
    token_at,
)

CONSUMER, PRODUCER = TransferRole.CONSUMER, TransferRole.PRODUCER
GIVE_BACK = OnPreemption.GIVE_BACK


class NotingDriver(Driver):
    """A driver that also keeps the last output of every request."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.last: dict[str, RequestOutput] = {}

    def note(self, outputs: Any) -> None:
        outputs = list(outputs)
        super().note(outputs)
        self.last |= {output.request_id: output for output in outputs}

    def is_given_back(self, request: Request) -> bool:
        last = self.last[request.request_id]
        return last.finish_reason is FinishReason.ERROR and last.error_kind is ErrorKind.GIVEN_BACK


def make_driver(
    num_ahead: int = 0, next_token: Callable[[str, int], int] = token_at, **settings: Any
) -> NotingDriver:
    """Four usable blocks: two requests of two blocks each run until one of them needs a third."""
    defaults = {"num_blocks": 5, "async_scheduling": num_ahead > 0}
    connector = FakeConnector(holds=True)
    scheduler = make_scheduler(connector, **defaults | settings)
    return NotingDriver(scheduler, FakeRunner(next_token, connector.memory), num_ahead, connector)


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
@pytest.mark.parametrize("batching", ["unified", "prefill_first"])
def test_c09_a_victim_that_goes_on_elsewhere_ends_once_after_all_its_tokens(
    num_ahead: int, batching: str
) -> None:
    driver = make_driver(num_ahead, batching=batching)
    old, young = make_request(20, max_tokens=30), make_request(30, max_tokens=30, on_preemption=GIVE_BACK)
    driver.add(old, young)
    while not driver.step().preempted_req_ids:
        pass
    num_sampled = len(driver.tokens[young.request_id]) + young.num_output_placeholders
    if young.request_id not in driver.ends:
        assert driver.scheduler.request_counts().waiting == 1, "until its token is known"
    driver.run_to_end()
    assert driver.is_given_back(young)
    assert driver.tokens[young.request_id] == [token_at(young.request_id, i) for i in range(num_sampled)]
    assert driver.last[young.request_id].first_position == num_sampled
    assert driver.ends[old.request_id] is FinishReason.LENGTH
    counters = driver.scheduler.counters()
    assert (counters["preemptions"], counters["requests_given_back"]) == (1, 1)


def test_a_token_under_way_that_ends_its_victim_wins() -> None:
    driver = make_driver(1, lambda name, position: EOS if position == 3 else token_at(name, position))
    old = make_request(26, max_tokens=30, ignore_eos=True)
    young = make_request(29, max_tokens=30, on_preemption=GIVE_BACK)
    driver.add(old, young)
    driver.run_to_end()
    assert driver.scheduler.counters()["preemptions"] == 1
    assert driver.ends[young.request_id] is FinishReason.STOP


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_c20_a_victim_that_fits_host_memory_stays_and_any_other_is_given_back(num_ahead: int) -> None:
    for num_swap_blocks, stays in ((8, True), (1, False)):
        driver = make_driver(num_ahead, preemption="swap", num_swap_blocks=num_swap_blocks)
        old, young = make_request(20, max_tokens=30), make_request(30, max_tokens=30, on_preemption=GIVE_BACK)
        driver.add(old, young)
        tokens = driver.run_to_end()
        assert driver.scheduler.counters()["preemptions"] == 1
        assert driver.is_given_back(young) is not stays
        assert (len(tokens[young.request_id]) == 30) is stays


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_c41_a_producer_that_is_given_back_hands_nothing_over(num_ahead: int) -> None:
    driver = make_driver(num_ahead, max_num_batched_tokens=18, enable_prefix_caching=False)
    old = make_request(16, max_tokens=30)
    young = make_request(48, max_tokens=30, role=PRODUCER, on_preemption=GIVE_BACK)
    driver.add(old)
    driver.step()
    driver.add(young)
    driver.run_to_end()
    assert driver.is_given_back(young)
    assert driver.tokens[young.request_id] == [token_at(young.request_id, 0)] * young.num_output_tokens
    assert young.first_token is None
    assert driver.connector is not None
    assert driver.connector.leased == {}


def test_c09_a_producers_token_in_flight_is_reported_before_it_is_given_back() -> None:
    driver = make_driver(1, enable_prefix_caching=False)
    old = make_request(32, max_tokens=30)
    young = make_request(32, max_tokens=30, role=PRODUCER, on_preemption=GIVE_BACK)
    driver.add(old, young)
    driver.step()
    assert driver.step().preempted_req_ids == {young.request_id}, "both had two full blocks"
    driver.run_to_end()
    assert driver.is_given_back(young)
    assert driver.tokens[young.request_id] == [token_at(young.request_id, 0)]
    assert young.first_token is None


def test_c36_a_handed_over_request_that_is_given_back_goes_on_elsewhere_with_all_its_tokens() -> None:
    driver = make_driver(1)
    assert driver.connector is not None
    old = make_request(20, max_tokens=30)
    driver.add(old)
    driver.step()
    young = make_request(
        30, request_id="y", prompt=[9] * 30, max_tokens=30, role=CONSUMER, on_preemption=GIVE_BACK
    )
    driver.add(young)
    while "y" not in driver.connector.loading:
        driver.step()
    driver.note(flatten(driver.scheduler.update_connector_output(received(young, token_at("y", 0)))))
    driver.run_to_end()
    assert driver.is_given_back(young)
    said = driver.tokens["y"]
    assert 1 < len(said) < 30
    other = make_driver(1)
    assert other.connector is not None
    moved = make_request(request_id="y", prompt=[9] * 30, max_tokens=30, role=CONSUMER, output_token_ids=said)
    other.add(moved)
    while "y" not in other.connector.loading:
        other.step()
    first = received(moved, token_at("y", len(said)))
    other.note(flatten(other.scheduler.update_connector_output(first)))
    assert other.run_to_end()["y"] == [token_at("y", position) for position in range(30)]


def test_a_load_that_fails_or_is_put_off_is_no_preemption() -> None:
    connector = FakeConnector()
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    fails, waits = (make_request(20, role=CONSUMER, on_preemption=GIVE_BACK) for _ in range(2))
    for request in (fails, waits):
        scheduler.add_request(request)
    run_step(scheduler, runner)
    postponed = FailedKV(waits.request_id, 0, "later", is_postponed=True)
    assert scheduler.update_connector_output(failed(fails)) == {}
    assert scheduler.update_connector_output(KVConnectorOutput(failed_recving=(postponed,))) == {}
    run_step(scheduler, runner)
    assert (fails.status, waits.is_finished) == (RequestStatus.RUNNING, False)


def test_c25_a_forced_reset_gives_no_request_back_since_there_is_room() -> None:
    driver = make_driver()
    request = make_request(20, max_tokens=5, on_preemption=GIVE_BACK)
    driver.add(request)
    driver.step()
    assert driver.scheduler.reset_prefix_cache(force=True)
    assert len(driver.run_to_end()[request.request_id]) == 5


def test_c51_a_victim_that_its_client_ends_first_is_not_given_back_as_well() -> None:
    driver = make_driver(2)
    old, young = make_request(20, max_tokens=30), make_request(30, max_tokens=30, on_preemption=GIVE_BACK)
    driver.add(old, young)
    while not driver.step().preempted_req_ids:
        pass
    assert young.request_id not in driver.ends, "a token of it is under way"
    ended = driver.scheduler.finish_requests([young.request_id], RequestStatus.FINISHED_ABORTED)
    driver.note(flatten(ended))
    driver.run_to_end()
    assert driver.ends[young.request_id] is FinishReason.ABORT
