"""FailStop: a runner for which the first step that fails is the last.

Where ranks meet in collectives, one that left a step half done must not begin another: its first call there would meet
the call that the others still wait in, and give them a wrong sum for the right one.
"""

from typing import Protocol

from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.pipeline import Launched, Runner, StepLauncher


class StepRunner(Runner, StepLauncher, Protocol):
    """What computes steps either way."""


class FailStop:
    """Raises at once for every step after one that could not be begun, or was not computed."""

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
        """A step that fails while it is waited for had all its calls queued, as have those launched behind it."""
        self._check()
        try:
            return self._runner.launch(plan)
        except BaseException:
            self._failed_step = plan.step
            raise

    def _check(self) -> None:
        if self._failed_step is not None:
            raise RuntimeError(f"step {self._failed_step} failed on this rank, which ends with it")
