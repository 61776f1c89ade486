"""A rank computes nothing after a failed step. A GPU reports a failed step only when the step's work is done, or the
GPU is lost."""

import pytest

from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.pipeline import DeviceLostError, Launched, StepLauncher
from engine.step_failures import FailSettled, FailStop
from tests.factories.fake_rank import make_plan

FAILS_IN_LAUNCH, FAILS_IN_WAIT = 2, 3


class Device:
    """Fails one step at its launch, and another step in the wait for it. Counts steps and waits."""

    def __init__(self, *, is_lost: bool = False) -> None:
        self._is_lost = is_lost
        self.num_steps = 0
        self.num_settled = 0

    def launch(self, plan: SchedulerOutput) -> Launched:
        self.num_steps += 1
        if plan.step == FAILS_IN_LAUNCH:
            raise ValueError("out of memory")
        return Step(plan.step)

    def settle(self) -> None:
        self.num_settled += 1
        if self._is_lost:
            raise RuntimeError("an illegal memory access was encountered")


class Step:
    def __init__(self, number: int) -> None:
        self._number = number

    def wait(self) -> ModelRunnerOutput:
        if self._number == FAILS_IN_WAIT:
            raise ValueError("out of memory")
        return ModelRunnerOutput({})


def run(runner: StepLauncher, plan: SchedulerOutput) -> ModelRunnerOutput:
    return runner.launch(plan).wait()


def test_the_first_step_that_fails_is_the_last() -> None:
    device = Device()
    runner = FailStop(device)
    run(runner, make_plan(1))
    with pytest.raises(ValueError, match="out of memory"):
        run(runner, make_plan(FAILS_IN_LAUNCH))
    with pytest.raises(RuntimeError, match="step 2 failed on this rank"):
        run(runner, make_plan(4))
    assert device.num_steps == 2


def test_a_step_that_fails_in_wait_is_not_the_last() -> None:
    """Its collective calls are over, so this rank is where the other ranks are."""
    device = Device()
    runner = FailStop(device)
    with pytest.raises(ValueError, match="out of memory"):
        run(runner, make_plan(FAILS_IN_WAIT))
    assert run(runner, make_plan(4)) == ModelRunnerOutput({})


def test_a_failed_step_is_reported_when_the_device_is_done_with_it() -> None:
    device = Device()
    runner = FailSettled(device, device.settle)
    for number, num_settled in ((FAILS_IN_LAUNCH, 1), (FAILS_IN_WAIT, 2)):
        with pytest.raises(ValueError, match="out of memory"):
            run(runner, make_plan(number))
        assert device.num_settled == num_settled
    assert run(runner, make_plan(4)) == ModelRunnerOutput({})
    assert device.num_settled == 2, "a successful step needs no wait"


def test_a_device_that_refuses_to_wait_is_lost() -> None:
    device = Device(is_lost=True)
    for number in (FAILS_IN_LAUNCH, FAILS_IN_WAIT):
        with pytest.raises(DeviceLostError, match="illegal memory access") as raised:
            run(FailSettled(device, device.settle), make_plan(number))
        assert isinstance(raised.value.__cause__, ValueError)
