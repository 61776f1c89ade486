"""Behaviour 56 as the scheduler sees it: steps that the device failed to compute, and steps planned on top of them."""

from baton.kv import TransferRole
from baton.request import ErrorKind
from baton.step import ModelRunnerOutput
from scheduler import RequestStatus
from tests.factories.scheduling import FakeConnector, flatten, make_request, make_scheduler, received


def test_c56_a_prompt_that_arrived_behind_hits_is_given_back_when_a_step_fails() -> None:
    """The blocks that it hit were never computed."""
    connector = FakeConnector()
    scheduler = make_scheduler(connector, async_scheduling=True)
    failing = make_request(prompt=[7] * 40)
    behind_hits = make_request(prompt=[7] * 64, role=TransferRole.CONSUMER)
    scheduler.add_request(failing)
    failed = scheduler.schedule()
    scheduler.add_request(behind_hits)
    later = scheduler.schedule()
    assert connector.started[behind_hits.request_id][1] == 32
    scheduler.update_connector_output(received(behind_hits))
    outputs = flatten(scheduler.retry_in_halves(failed, [later], "why"))
    assert {output.request_id: output.error_kind for output in outputs} == {
        failing.request_id: ErrorKind.STEP_FAILED,
        behind_hits.request_id: ErrorKind.GIVEN_BACK,
    }
    scheduler.check_integrity()


def test_c56_the_runner_learns_of_requests_that_ended_before_a_step_that_it_never_computes() -> None:
    scheduler = make_scheduler(async_scheduling=True)
    failing, ended = make_request(), make_request()
    scheduler.add_request(ended)
    scheduler.schedule()
    scheduler.add_request(failing)
    failed = scheduler.schedule()
    scheduler.finish_requests([ended.request_id], RequestStatus.FINISHED_ABORTED)
    later = scheduler.schedule()
    assert later.finished_req_ids == {ended.request_id}
    scheduler.retry_in_halves(failed, [later], "why")
    assert ended.request_id in scheduler.schedule().finished_req_ids


def test_c56_no_plan_waits_for_the_output_of_a_failed_step() -> None:
    """Not even after one of its requests has ended amid a later step."""
    scheduler = make_scheduler(async_scheduling=True, num_speculative_tokens=2)
    requests = [make_request(), make_request()]
    for request in requests:
        scheduler.add_request(request)
    scheduler.retry_in_halves(scheduler.schedule(), [], "why")
    plan = scheduler.schedule()
    (tried,) = plan.num_scheduled_tokens
    scheduler.finish_requests([tried], RequestStatus.FINISHED_ABORTED)
    scheduler.update_from_output(plan, ModelRunnerOutput({tried: [5]}, unforeseeable={tried}))
    assert not scheduler.awaits_output
