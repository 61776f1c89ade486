"""Runners that make a failed step safe: FailSettled on one GPU, FailStop with several ranks.

After a failure, a GPU still executes the work that was queued before. But the caller frees a failed step's
blocks at once, and transfers may then use them without waiting for the step's stream. So FailSettled waits
for the device. After some errors CUDA refuses every call until the process ends.

A rank that left a step half done must not begin another step. Its first collective call would match a call of
the old step, in which the other ranks still wait, and would give them a wrong sum.
"""

from collections.abc import Callable
from typing import TypeVar

from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.pipeline import DeviceLostError, Launched, StepLauncher

T = TypeVar("T")


class FailStop:
    """Raises at once for every step that follows a step which could not be launched."""

    def __init__(self, runner: StepLauncher) -> None:
        self._runner = runner
        self._failed_step: int | None = None

    def launch(self, plan: SchedulerOutput) -> Launched:
        """Launches the step; RuntimeError if an earlier step could not be launched.

        After a failure in `wait`, later steps are still launched: by then, all collective calls of the failed step
        are queued or over.

        A step that needs an unknown token of the failed step fails before its first collective call (TorchForward).
        """
        if self._failed_step is not None:
            raise RuntimeError(
                f"step {self._failed_step} failed on this rank, so the rank computes no more steps"
            )
        try:
            return self._runner.launch(plan)
        except BaseException:
            self._failed_step = plan.step
            raise


class FailSettled:
    """Raises what the runner raises, or DeviceLostError if no other step can follow."""

    def __init__(self, runner: StepLauncher, settle: Callable[[], None]) -> None:
        """`settle` waits until the device has done all queued work, and raises if the device cannot do it."""
        self._runner = runner
        self._settle = settle

    def launch(self, plan: SchedulerOutput) -> Launched:
        return _Step(self.settled(lambda: self._runner.launch(plan)), self)

    def settled(self, call: Callable[[], T]) -> T:
        """Returns the call's result.

        If the call raises an error, waits for the device, then raises the error.
        """
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
