"""FailStop: a runner that computes nothing after its first failed step.

A rank that left a step half done must not begin another. Its first collective call would match the call in which the
other ranks still wait, and give them a wrong sum.
"""

from typing import Protocol

from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.pipeline import Launched, Runner, StepLauncher


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
            raise RuntimeError(f"step {self._failed_step} failed on this rank, which computes no other")
