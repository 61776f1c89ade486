"""What a step with many requests does for each of them, and what it does once: there are thousands of steps a minute.

`benchmarks.scheduler_instructions` counts what such a step costs in all.
"""

from typing import Any

import pytest

from baton.request import RequestOutput
from baton.step import ModelRunnerOutput
from scheduler import Scheduler
from scheduler import scheduler as scheduler_module
from tests.factories.scheduling import flatten, make_request, make_scheduler

NUM_REQUESTS = 16


def decoding(**overrides: Any) -> Scheduler:
    """A scheduler whose next step computes one token of each request, and needs no block."""
    scheduler = make_scheduler(**overrides)
    for number in range(NUM_REQUESTS):
        scheduler.add_request(make_request(17, request_id=f"r{number}", max_tokens=50))
    run_decode_step(scheduler)
    return scheduler


def run_decode_step(scheduler: Scheduler) -> list[RequestOutput]:
    plan = scheduler.schedule()
    assert len(plan.num_scheduled_tokens) == NUM_REQUESTS
    output = ModelRunnerOutput({request_id: [7] for request_id in plan.num_scheduled_tokens})
    return flatten(scheduler.update_from_output(plan, output))


def test_an_output_of_a_usual_step_is_made_without_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, keywords = decoding(), list[str]()

    def make(*values: Any, **by_name: Any) -> RequestOutput:
        keywords.extend(by_name)
        return RequestOutput(*values, **by_name)

    monkeypatch.setattr(scheduler_module, "RequestOutput", make)
    outputs = run_decode_step(scheduler)
    assert outputs[3] == RequestOutput("r3", first_position=1, token_ids=(7,))
    assert keywords == []
