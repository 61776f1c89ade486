"""What a step with many requests does for each of them, and what it does once: there are thousands of steps a minute.

`benchmarks.scheduler_instructions` counts what such a step costs in all.
"""

import dis
import sys
from collections import Counter
from collections.abc import Callable
from enum import EnumType
from functools import cache
from types import CodeType, FrameType
from typing import Any

import pytest

from baton.kv import TransferRole
from baton.request import RequestOutput
from baton.step import ModelRunnerOutput
from scheduler import Scheduler
from scheduler import scheduler as scheduler_module
from tests.factories.costs import calls_in
from tests.factories.scheduling import EOS, FakeConnector, flatten, make_request, make_scheduler

NUM_REQUESTS = 16


def decoding(**overrides: Any) -> Scheduler:
    """A scheduler whose next step computes one token of each request, and needs no block."""
    scheduler = make_scheduler(**overrides)
    for number in range(NUM_REQUESTS):
        scheduler.add_request(make_request(17, request_id=f"r{number}", max_tokens=50))
    run_decode_step(scheduler)
    return scheduler


def prefilling() -> Scheduler:
    """A scheduler whose next step computes a part of each prompt for another worker."""
    scheduler = make_scheduler(FakeConnector(), long_prefill_token_threshold=4)
    for _ in range(NUM_REQUESTS):
        scheduler.add_request(make_request(17, role=TransferRole.PRODUCER))
    scheduler.schedule()
    return scheduler


def run_decode_step(scheduler: Scheduler, ends: str = "", **output: Any) -> list[RequestOutput]:
    """Every request samples a token; that of the request `ends` ends it."""
    plan = scheduler.schedule()
    assert len(plan.num_scheduled_tokens) == NUM_REQUESTS
    samples = {request_id: [EOS if request_id == ends else 7] for request_id in plan.num_scheduled_tokens}
    return flatten(scheduler.update_from_output(plan, ModelRunnerOutput(samples, **output)))


def lookups_of_enums(run: Callable[[], object]) -> Counter[str]:
    """How often each function looked up an Enum class while this ran."""
    counts: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        frame.f_trace_opcodes = True
        name = _globals_loaded(frame.f_code).get(frame.f_lasti, "") if event == "opcode" else ""
        if isinstance(frame.f_globals.get(name), EnumType):
            counts[f"{frame.f_code.co_qualname} looks up {name}"] += 1
        return trace

    former = sys.gettrace()
    # Python 3.12 reports opcodes only if a frame has asked for them before settrace.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(former)
    return counts


def called_for_each(run: Callable[[], object]) -> set[str]:
    """Python functions that were called at least once for each request while this ran."""
    return {name for name, count in calls_in(run).items() if count >= NUM_REQUESTS}


@cache
def _globals_loaded(code: CodeType) -> dict[int, str]:
    """The global names that the code loads, by the offset of the instruction."""
    return {each.offset: each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}


def test_an_output_of_a_usual_step_is_made_without_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, keywords = decoding(), list[str]()

    def make(*values: Any, **by_name: Any) -> RequestOutput:
        keywords.extend(by_name)
        return RequestOutput(*values, **by_name)

    monkeypatch.setattr(scheduler_module, "RequestOutput", make)
    outputs = run_decode_step(scheduler)
    assert outputs[3] == RequestOutput("r3", first_position=1, token_ids=(7,))
    assert keywords == []


class Uncut(list[int]):
    """Sampled tokens that may be copied only as a whole."""

    def __getitem__(self, index: Any) -> Any:
        assert not isinstance(index, slice), "tokens are copied twice"
        return super().__getitem__(index)


def test_the_tokens_of_an_output_are_copied_once() -> None:
    scheduler = decoding()
    plan = scheduler.schedule()
    samples = {request_id: Uncut([7]) for request_id in plan.num_scheduled_tokens}
    outputs = flatten(scheduler.update_from_output(plan, ModelRunnerOutput(samples)))
    assert [output.token_ids for output in outputs] == [(7,)] * NUM_REQUESTS


@pytest.mark.parametrize(
    ("overrides", "output"),
    [({}, {}), ({"num_speculative_tokens": 2}, {"draft_token_ids": {"r3": (1, 2)}, "unforeseeable": {"r5"}})],
    ids=["without drafts", "with drafts"],
)
def test_members_of_enums_are_looked_up_once(overrides: dict[str, Any], output: dict[str, Any]) -> None:
    scheduler = decoding(**overrides)
    found = lookups_of_enums(lambda: run_decode_step(scheduler, **output))
    assert found["Running.continue_all looks up RequestStatus"] == 1
    assert {name: count for name, count in found.items() if count > 1} == {}


def test_an_end_does_not_look_up_members_for_requests_that_run_on() -> None:
    scheduler = decoding()
    found = lookups_of_enums(lambda: run_decode_step(scheduler, ends="r3"))
    assert "r3" not in scheduler.request_ids
    assert found["Running.drop_stopped looks up RequestStatus"] == 1
    assert found.total() < NUM_REQUESTS


def test_few_functions_are_called_for_each_request() -> None:
    scheduler = decoding()
    assert called_for_each(lambda: run_decode_step(scheduler)) == {
        "Running.num_wanted_tokens",
        "KVCache.extend_table",
        "StepPlan.proceed",
        "StepPlan._spend",
        "Scheduler._take_tokens",
        "__create_fn__.<locals>.__init__",  # of RequestOutput
    }


def test_the_role_in_a_hand_over_needs_no_call() -> None:
    """Each step of a prefill worker looks at the role of all its requests."""
    called = called_for_each(prefilling().schedule)
    assert "Running.num_fitting_tokens" in called
    assert {name for name in called if name.startswith("Request.is_")} <= {"Request.is_prefilling"}


def test_parts_of_prompts_do_not_look_at_one_another() -> None:
    """A step may have parts of hundreds of prompts."""
    counts = calls_in(prefilling().schedule)
    assert counts["Running.num_fitting_tokens"] == NUM_REQUESTS
    assert max(counts.values()) <= 2 * NUM_REQUESTS
