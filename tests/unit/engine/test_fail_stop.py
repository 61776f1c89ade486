"""A rank whose step failed computes no other."""

from collections.abc import Callable

import pytest

from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.fail_stop import FailStop
from engine.pipeline import Launched
from tests.factories.fake_rank import make_plan


class Done:
    """A step that is over."""

    def wait(self) -> ModelRunnerOutput:
        return ModelRunnerOutput({})


class Device:
    """Fails at step 2 and counts its steps."""

    def __init__(self) -> None:
        self.num_steps = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        if plan.step == 2:
            raise ValueError("the device is on fire")
        return ModelRunnerOutput({})

    def launch(self, plan: SchedulerOutput) -> Launched:
        self.execute(plan)
        return Done()


@pytest.mark.parametrize(
    "run",
    [lambda runner, plan: runner.execute(plan), lambda runner, plan: runner.launch(plan)],
    ids=["execute", "launch"],
)
def test_the_first_step_that_fails_is_the_last(run: Callable[[FailStop, SchedulerOutput], object]) -> None:
    device = Device()
    runner = FailStop(device)
    run(runner, make_plan(1))
    with pytest.raises(ValueError, match="on fire"):
        run(runner, make_plan(2))
    with pytest.raises(RuntimeError, match="step 2 failed on this rank"):
        run(runner, make_plan(3))
    assert device.num_steps == 2
