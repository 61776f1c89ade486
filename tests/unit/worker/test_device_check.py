"""The device check: what it says of a device, what it changes, and when a device counts as unfit."""

from pathlib import Path
from typing import Any

import pytest

from baton.clock import VirtualClock
from baton.kv_groups import ONE_GROUP
from baton.request import ErrorKind
from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.pipeline import DeviceLostError, StreamPipeline
from tests.factories.engine import StepHook, make_core, make_engine_request
from tests.factories.scheduling import FakeRunner
from tests.factories.whole_engines import EnginesOf
from tests.integration.test_sliding_windows import LENGTHS, SETTINGS, request_of
from worker.device_check import (
    CHECKING,
    MAX_NON_FINITE_STEPS,
    NON_FINITE_WINDOW_S,
    DeviceHealth,
    fault_of_device,
)


class ChecksFailFor(FakeRunner):
    """A runner whose logits are not finite, for all requests in the steps, and for the first checks."""

    def __init__(self, num_failing_checks: int) -> None:
        super().__init__()
        self.num_failing_checks = num_failing_checks
        self.num_checks = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        sampled = super().execute(plan).sampled_token_ids
        if CHECKING not in plan.num_scheduled_tokens:
            return ModelRunnerOutput({}, non_finite=sampled.keys())
        self.num_checks += 1
        is_wrong = self.num_checks <= self.num_failing_checks
        return ModelRunnerOutput({}, non_finite=sampled.keys()) if is_wrong else ModelRunnerOutput(sampled)


def raises(error: Exception) -> StepHook:
    def fail(_: SchedulerOutput) -> None:
        raise error

    return StepHook(fail)


def test_it_says_what_failed() -> None:
    assert fault_of_device(StreamPipeline(FakeRunner()), ONE_GROUP) is None
    assert fault_of_device(StreamPipeline(ChecksFailFor(1)), ONE_GROUP) == "its logits are not finite"
    broken = StreamPipeline(raises(ValueError("on fire")))
    assert fault_of_device(broken, ONE_GROUP) == "ValueError: on fire"
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        fault_of_device(StreamPipeline(raises(DeviceLostError("illegal memory access"))), ONE_GROUP)


def test_a_runner_can_be_checked_again_and_again() -> None:
    pipeline = StreamPipeline(FakeRunner())
    assert [fault_of_device(pipeline, ONE_GROUP) for _ in range(3)] == [None] * 3


def test_c55_a_device_that_was_unfit_once_blames_no_request_and_is_checked_no_more() -> None:
    device = ChecksFailFor(1)
    core = make_core(device, async_scheduling=False, max_num_seqs=1)
    ends = {}
    for name in ("first", "second"):
        core.add_request(make_engine_request(name), "gateway")
        ends[name] = core.step()["gateway"][-1].error_kind
    assert ends == {"first": ErrorKind.GIVEN_BACK, "second": ErrorKind.GIVEN_BACK}
    assert device.num_checks == 1
    core.close()


@pytest.mark.parametrize(("pace_s", "is_fit"), [(1.0, False), (NON_FINITE_WINDOW_S / 2, True)])
def test_c55_steps_that_are_not_finite_count_against_a_device_only_if_they_come_close_together(
    pace_s: float, is_fit: bool
) -> None:
    clock = VirtualClock()
    health = DeviceHealth(lambda: None, clock)
    for _ in range(MAX_NON_FINITE_STEPS):
        assert health.is_fit_after("too hot")
        clock.advance(pace_s)
        health.count_non_finite_step()
    assert health.is_fit_after("too hot") is is_fit
    assert health.num_non_finite_steps == MAX_NON_FINITE_STEPS


@pytest.mark.parametrize(
    "settings",
    [{}, {"speculation": {"method": "ngram", "num_speculative_tokens": 3}}],
    ids=["plain", "drafts"],
)
def test_a_check_after_every_step_changes_no_token(folder: Path, settings: dict[str, Any]) -> None:
    """This also holds while another step is under way."""
    answers = []
    for is_checked in (False, True):
        with EnginesOf(folder) as engines:
            engine = engines.start("d", **SETTINGS, **settings)
            for length in LENGTHS:
                engine.add(request_of(length))
            while engine.scheduler.has_requests():
                engines.step()
                if is_checked:
                    assert engine.core.health.is_fit_after("nothing")
            answers.append({name: answer.token_ids for name, answer in engine.answers.items()})
    assert answers[0] == answers[1]
