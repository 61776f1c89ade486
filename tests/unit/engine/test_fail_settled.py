"""A failed step is reported when the device is done with it, and a lost device is detected."""

from collections.abc import Callable

import pytest

from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.gpu.fail_settled import FailSettled
from engine.pipeline import DeviceLostError, Launched
from tests.factories.fake_rank import make_plan


class Device:
    """Fails at step 2 as it is launched, at step 3 as it is waited for, and notes what it was asked."""

    def __init__(self, *, is_lost: bool) -> None:
        self._is_lost = is_lost
        self.num_settled = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self.launch(plan).wait()

    def launch(self, plan: SchedulerOutput) -> Launched:
        if plan.step == 2:
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
        if self._number == 3:
            raise ValueError("out of memory")
        return ModelRunnerOutput({})


RUNS: list[Callable[[FailSettled, SchedulerOutput], ModelRunnerOutput]] = [
    lambda runner, plan: runner.execute(plan),
    lambda runner, plan: runner.launch(plan).wait(),
]


@pytest.mark.parametrize("run", RUNS, ids=["execute", "launch"])
def test_a_failed_step_is_reported_when_the_device_is_done_with_it(
    run: Callable[[FailSettled, SchedulerOutput], ModelRunnerOutput],
) -> None:
    device = Device(is_lost=False)
    runner = FailSettled(device, device.settle)
    for number, num_settled in ((2, 1), (3, 2)):
        with pytest.raises(ValueError, match="out of memory"):
            run(runner, make_plan(number))
        assert device.num_settled == num_settled
    assert run(runner, make_plan(4)) == ModelRunnerOutput({})
    assert device.num_settled == 2, "no step waits that has not failed"


@pytest.mark.parametrize("run", RUNS, ids=["execute", "launch"])
def test_a_device_that_refuses_to_wait_is_lost(
    run: Callable[[FailSettled, SchedulerOutput], ModelRunnerOutput],
) -> None:
    device = Device(is_lost=True)
    for number in (2, 3):
        with pytest.raises(DeviceLostError, match="illegal memory access") as raised:
            run(FailSettled(device, device.settle), make_plan(number))
        assert isinstance(raised.value.__cause__, ValueError)
