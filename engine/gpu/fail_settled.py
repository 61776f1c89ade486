"""FailSettled: a runner that reports a failed step only when its device is idle, and detects a lost device.

After a failure a GPU still executes what was queued before. The caller frees a failed step's blocks, also for transfers
that no stream orders behind the step. After some errors CUDA refuses every call until the process ends.
"""

from collections.abc import Callable
from typing import TypeVar

from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.fail_stop import StepRunner
from engine.pipeline import DeviceLostError, Launched

T = TypeVar("T")


class FailSettled:
    """Raises what the runner raises, or DeviceLostError if no other step can follow."""

    def __init__(self, runner: StepRunner, settle: Callable[[], None]) -> None:
        """`settle` waits until the device has done everything that is queued, and raises if it cannot."""
        self._runner = runner
        self._settle = settle

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self.settled(lambda: self._runner.execute(plan))

    def launch(self, plan: SchedulerOutput) -> Launched:
        return _Step(self.settled(lambda: self._runner.launch(plan)), self)

    def settled(self, call: Callable[[], T]) -> T:
        """Returns the call's result; waits for the device before it raises the call's error."""
        try:
            return call()
        except Exception as error:
            try:
                self._settle()
            except Exception as lost:
                raise DeviceLostError(f"the device is lost: {lost}") from error
            raise


class _Step:
    """A step under way."""

    def __init__(self, step: Launched, runner: FailSettled) -> None:
        self._step = step
        self._runner = runner

    def wait(self) -> ModelRunnerOutput:
        return self._runner.settled(self._step.wait)
