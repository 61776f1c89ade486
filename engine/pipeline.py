"""Where planned steps are computed: at once, by a thread of its own while the next step is planned, or by a device that
works by itself.

Knows no scheduler. Plans are computed in the order they were given, and their results taken in the same order.
"""

import queue
import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from baton.step import ModelRunnerOutput, SchedulerOutput


class DeviceLostError(RuntimeError):
    """A device computes nothing any more: neither this step nor any other."""


class Runner(Protocol):
    """Computes a plan on a device; returns when the sampled tokens are known."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan: what it sampled, or the error that the device raised."""

    output: ModelRunnerOutput | None
    error: Exception | None = None


class Launched(Protocol):
    """A step that a device works at."""

    def wait(self) -> ModelRunnerOutput: ...


class StepLauncher(Protocol):
    """Has a device compute a plan; returns as soon as the device has its orders."""

    def launch(self, plan: SchedulerOutput) -> Launched: ...


class Pipeline(Protocol):
    """Steps go in at one end and come out at the other."""

    @property
    def num_ahead(self) -> int:
        """Steps that may be under way while the next one is planned."""
        ...

    def submit(self, plan: SchedulerOutput) -> None: ...

    def take(self) -> StepResult:
        """The result of the oldest plan that was not taken yet; waits for it. There must be one."""
        ...

    def close(self) -> None:
        """Ends after the step under way. Nothing may be submitted any more, and what computed the steps is let go: NCCL
        ends only when the CUDA graphs that hold calls of it have."""
        ...


class InlinePipeline:
    """Computes a step as it is submitted: nothing is ever under way."""

    num_ahead = 0

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._results: deque[StepResult] = deque()

    def submit(self, plan: SchedulerOutput) -> None:
        self._results.append(_execute(self._runner, plan))

    def take(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        """Nothing is under way, so nothing has to end."""
        del self._runner


class ThreadedPipeline:
    """Computes on a thread of its own, so that a step can be planned while the one before it is computed."""

    num_ahead = 1

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plans: queue.SimpleQueue[SchedulerOutput | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def submit(self, plan: SchedulerOutput) -> None:
        self._plans.put(plan)

    def take(self) -> StepResult:
        return self._results.get()

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            self._results.put(_execute(self._runner, plan))


class StreamPipeline:
    """Launches a step behind the one that the device computes, so that the device goes on without waiting for us."""

    num_ahead = 1

    def __init__(self, launcher: StepLauncher) -> None:
        self._launcher = launcher
        self._steps: deque[Launched | Exception] = deque()

    def submit(self, plan: SchedulerOutput) -> None:
        try:
            self._steps.append(self._launcher.launch(plan))
        except BaseException as error:  # it belongs to this step, and is found when its turn comes
            self._steps.append(_as_error(error))

    def take(self) -> StepResult:
        step = self._steps.popleft()
        if isinstance(step, Exception):
            return StepResult(None, step)
        try:
            return StepResult(step.wait())
        except BaseException as error:  # the edge to the device, as below
            return StepResult(None, _as_error(error))

    def close(self) -> None:
        while self._steps:
            self.take()
        del self._launcher


def make_pipeline(runner: Runner, *, async_scheduling: bool) -> Pipeline:
    """For a device that computes where it is called: a CPU."""
    return ThreadedPipeline(runner) if async_scheduling else InlinePipeline(runner)


def _execute(runner: Runner, plan: SchedulerOutput) -> StepResult:
    try:
        return StepResult(runner.execute(plan))
    except BaseException as error:  # the edge to the device: the engine decides what the error means
        return StepResult(None, _as_error(error))


def _as_error(error: BaseException) -> Exception:
    """A panic of a foreign library is no Exception, and leaves the device in an unknown state."""
    if isinstance(error, Exception):
        return error
    lost = DeviceLostError(f"{type(error).__name__}: {error}")
    lost.__cause__ = error
    return lost
