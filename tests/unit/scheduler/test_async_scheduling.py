"""Behaviours 9, 11, 40, 46 with a step under way: planned ahead, nothing is lost, doubled or computed in vain."""

import pytest

from baton.kv import TransferRole
from baton.request import FinishReason
from baton.step import KVConnectorOutput
from scheduler import RequestStatus
from tests.factories.driving import Driver
from tests.factories.scheduling import (
    EOS,
    FakeConnector,
    FakeRunner,
    make_request,
    make_scheduler,
    received,
    token_at,
)


def eos_at(position: int) -> FakeRunner:
    return FakeRunner(lambda request_id, at: EOS if at == position else token_at(request_id, at))


def test_c11_the_next_step_is_planned_before_the_last_ones_token_is_known() -> None:
    driver = Driver(make_scheduler(), num_ahead=1)
    request = make_request(10, max_tokens=5)
    driver.add(request)
    plans = [driver.step() for _ in range(3)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{request.request_id: n} for n in (10, 1, 1)]
    assert (request.num_output_tokens, request.num_output_placeholders) == (2, 1)
    assert request.num_computed_tokens == request.num_tokens


@pytest.mark.parametrize(
    ("settings", "max_tokens", "num_outputs"),
    [({}, 1, 1), ({}, 2, 2), ({}, 5, 5), ({"max_model_len": 14}, 50, 4)],
)
def test_c11_no_step_is_planned_past_max_tokens_or_the_longest_context(
    settings: dict[str, int], max_tokens: int, num_outputs: int
) -> None:
    driver = Driver(make_scheduler(**settings), num_ahead=1)
    request = make_request(10, max_tokens=max_tokens)
    driver.add(request)
    num_computed = 0
    while driver.scheduler.has_requests():
        num_computed += driver.step().total_num_scheduled_tokens
    assert num_computed == 10 + num_outputs - 1, "the last token is never computed"
    assert len(driver.run_to_end()[request.request_id]) == num_outputs


def test_c11_an_unforeseeable_stop_costs_one_step_and_delivers_nothing_more() -> None:
    driver = Driver(make_scheduler(), eos_at(2), num_ahead=1)
    request = make_request(10, max_tokens=50)
    driver.add(request)
    tokens = driver.run_to_end()[request.request_id]
    assert tokens == [token_at(request.request_id, 0), token_at(request.request_id, 1), EOS]
    assert driver.ends == {request.request_id: FinishReason.STOP}


def test_c11_outputs_are_those_of_the_synchronous_scheduler() -> None:
    outputs = []
    for num_ahead in (0, 1, 2):
        driver = Driver(make_scheduler(num_blocks=12, max_num_batched_tokens=33), num_ahead=num_ahead)
        driver.add(*(make_request(40, request_id=f"r{i}", max_tokens=20) for i in range(6)))
        outputs.append(driver.run_to_end())
        assert driver.scheduler.counters()["preemptions"] > 0
    assert outputs[0] == outputs[1] == outputs[2]


def test_c11_driven_in_turn_the_asynchronous_scheduler_plans_the_same_steps() -> None:
    histories = []
    for async_scheduling in (True, False):
        driver = Driver(make_scheduler(num_blocks=12, async_scheduling=async_scheduling))
        driver.add(*(make_request(40, request_id=f"r{i}", prompt=[i] * 40) for i in range(6)))
        history = []
        while driver.scheduler.has_requests():
            plan = driver.step()
            history.append((dict(plan.num_scheduled_tokens), plan.preempted_req_ids, plan.finished_req_ids))
        histories.append(history)
    assert histories[0] == histories[1]


def test_c09_a_token_under_way_at_a_preemption_is_delivered_once_and_not_sampled_again() -> None:
    driver = Driver(make_scheduler(num_blocks=5), num_ahead=1)
    old, young = make_request(31, max_tokens=6), make_request(30, max_tokens=6)
    driver.add(old, young)
    plans = [driver.step()]
    while not plans[-1].preempted_req_ids:
        plans.append(driver.step())
    assert young.request_id in plans[-2].num_scheduled_tokens, (
        "its step was under way when it lost its blocks"
    )
    tokens = driver.run_to_end()
    assert tokens[young.request_id] == [token_at(young.request_id, position) for position in range(6)]


def test_c09_a_preempted_request_waits_until_its_token_is_known() -> None:
    driver = Driver(make_scheduler(), num_ahead=1)
    request = make_request(10, max_tokens=4)
    driver.add(request)
    driver.step()
    assert driver.scheduler.reset_prefix_cache(force=True)
    plan = driver.scheduler.schedule()
    assert plan.num_scheduled_tokens == {}
    assert request.num_output_placeholders == 1
    driver.under_way.append(plan)
    driver.complete()
    assert driver.step().num_scheduled_tokens == {request.request_id: 11}
    driver.run_to_end()


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_an_abort_in_mid_step_ends_a_request_at_once_and_its_token_is_dropped(num_steps: int) -> None:
    driver = Driver(make_scheduler(max_num_batched_tokens=8), num_ahead=1)
    request, other = make_request(20, max_tokens=9), make_request(3, max_tokens=9)
    driver.add(request, other)
    for _ in range(num_steps):
        driver.step()
    news = driver.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    driver.note(news["client"])
    assert len(driver.run_to_end()[other.request_id]) == 9


def test_a_block_that_a_step_under_way_computes_cannot_be_hit_after_an_abort() -> None:
    driver, request = Driver(make_scheduler(), num_ahead=1), make_request(30, max_tokens=9)
    driver.add(request)
    for _ in range(3):
        driver.step()
    assert request.num_tokens == request.num_computed_tokens == 32, "the third step computes the last token"
    news = driver.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    driver.note(news["client"])
    driver.add(make_request(prompt=[*request.all_token_ids, 7], max_tokens=1))
    (new,) = driver.step().scheduled_new_reqs
    assert new.num_computed_tokens == 16
    driver.run_to_end()


def test_an_id_may_return_while_the_step_of_its_former_owner_is_under_way() -> None:
    driver = Driver(make_scheduler(), num_ahead=1)
    driver.add(make_request(10, request_id="same", max_tokens=9))
    driver.step()
    driver.step()
    driver.scheduler.finish_requests(["same"], RequestStatus.FINISHED_ABORTED)
    driver.tokens.clear()
    driver.add(make_request(5, request_id="same", max_tokens=2))
    driver.step()
    assert driver.tokens["same"] == [], "the former owner's token is dropped"
    while driver.scheduler.has_requests():
        driver.step()
    assert len(driver.tokens["same"]) == 2


def test_c40_a_producer_is_never_computed_past_its_first_token() -> None:
    connector = FakeConnector(holds=True)
    driver = Driver(make_scheduler(connector), FakeRunner(memory=connector.memory), 1, connector)
    request = make_request(40, max_tokens=50, role=TransferRole.PRODUCER)
    driver.add(request)
    plans = [driver.step() for _ in range(3)]
    assert [plan.total_num_scheduled_tokens for plan in plans] == [40, 0, 0]
    assert request.status is RequestStatus.FINISHED_HANDED_OVER
    assert driver.scheduler.kv_block_counts().leased == 3
    driver.scheduler.update_connector_output(KVConnectorOutput(finished_sending=(request.request_id,)))
    driver.check_rest()


def test_c41_a_producer_preempted_with_its_token_under_way_samples_it_again() -> None:
    connector = FakeConnector(holds=True)
    driver = Driver(make_scheduler(connector), FakeRunner(memory=connector.memory), 1, connector)
    request = make_request(40, role=TransferRole.PRODUCER)
    driver.add(request)
    driver.step()
    assert driver.scheduler.reset_prefix_cache(force=True)
    driver.step()
    assert not request.is_finished, "token 0 has no blocks to go with"
    assert driver.tokens[request.request_id] == []
    driver.step()
    driver.complete()
    assert request.status is RequestStatus.FINISHED_HANDED_OVER
    assert driver.tokens[request.request_id] == [token_at(request.request_id, 0)]


def test_c29_a_received_request_computes_token_one_with_a_step_under_way() -> None:
    connector = FakeConnector()
    driver = Driver(make_scheduler(connector), FakeRunner(memory=connector.memory), 1, connector)
    local, handed_over = make_request(10), make_request(40, max_tokens=3, role=TransferRole.CONSUMER)
    driver.add(local, handed_over)
    driver.step()
    driver.step()
    first = token_at(handed_over.request_id, 0)
    driver.note(driver.scheduler.update_connector_output(received(handed_over, first))["client"])
    assert driver.step().num_scheduled_tokens[handed_over.request_id] == 1
    driver.run_to_end()
