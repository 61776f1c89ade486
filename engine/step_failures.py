"""Runners that make a failed step safe: FailSettled on one GPU, FailStop where ranks meet in collectives.

After a failure a GPU still executes what was queued before. The caller frees a failed step's blocks, even for transfers
that no stream orders after the step. After some errors CUDA refuses every call until the process ends.

A rank that left a step half done must not begin another. Its first collective call would match the call in which the
other ranks still wait, and give them a wrong sum.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.pipeline import DeviceLostError, Launched, Runner, StepLauncher

T = TypeVar("T")


class StepRunner(Runner, StepLauncher, Protocol):
    """Computes steps either way."""


class FailStop:
    """Raises at once for every step after one that could not be launched or computed."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._failed_step: int | None = None

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._check()
        try:
            return self._runner.execute(plan)
        except BaseException:
            self._failed_step = plan.step
            raise

    def launch(self, plan: SchedulerOutput) -> Launched:
        """Failures in `wait` need no check: all collective calls of launched steps are queued by then."""
        self._check()
        try:
            return self._runner.launch(plan)
        except BaseException:
            self._failed_step = plan.step
            raise

    def _check(self) -> None:
        if self._failed_step is not None:
            raise RuntimeError(
                f"step {self._failed_step} failed on this rank, so it computes no further step"
            )


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
