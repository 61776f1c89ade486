"""Where planned steps are computed: at once, on a separate thread, or by an asynchronous device.

Knows no scheduler. Plans are computed in the order in which they were submitted, and results are taken in that order.
"""

import queue
import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from baton.step import ModelRunnerOutput, SchedulerOutput


class DeviceLostError(RuntimeError):
    """The device is lost: it can compute neither this step nor any other."""


class Runner(Protocol):
    """Computes a plan on a device; returns when the sampled tokens are known."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a plan: what it sampled, or the error that the device raised."""

    output: ModelRunnerOutput | None
    error: Exception | None = None


class Launched(Protocol):
    """A step that a device computes."""

    def wait(self) -> ModelRunnerOutput: ...


class StepLauncher(Protocol):
    """Queues a plan on a device; returns as soon as it is queued."""

    def launch(self, plan: SchedulerOutput) -> Launched: ...


class Pipeline(Protocol):
    """Steps go in at one end and come out at the other."""

    def num_ahead(self, plan: SchedulerOutput) -> int:
        """Steps that may be under way while the one after this plan is planned."""
        ...

    def submit(self, plan: SchedulerOutput) -> None: ...

    def take(self) -> StepResult:
        """Waits for the result of the oldest plan that was not taken yet. There must be one."""
        ...

    def close(self) -> None:
        """Ends after the step under way. Nothing may be submitted any more. Releases the runner: NCCL can only end when
        no CUDA graph contains its calls."""
        ...


class InlinePipeline:
    """Computes a step when it is submitted: nothing is ever under way."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._results: deque[StepResult] = deque()

    def num_ahead(self, plan: SchedulerOutput) -> int:  # noqa: ARG002
        return 0

    def submit(self, plan: SchedulerOutput) -> None:
        self._results.append(_execute(self._runner, plan))

    def take(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        """Nothing is under way."""
        del self._runner


class ThreadedPipeline:
    """Computes on its own thread, so that a step can be planned while the previous one is computed."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plans: queue.SimpleQueue[SchedulerOutput | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def num_ahead(self, plan: SchedulerOutput) -> int:
        """None past a step with part of a prompt: to a CPU it is so much work that planning takes no time beside it,
        and a request that arrives meanwhile would wait for the planned step, too.
        """
        return int(plan.total_num_scheduled_tokens == len(plan.num_scheduled_tokens) > 0)

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
    """Launches a step while the device computes the previous one, so that the device never waits for the host."""

    def __init__(self, launcher: StepLauncher) -> None:
        self._launcher = launcher
        self._steps: deque[Launched | Exception] = deque()

    def num_ahead(self, plan: SchedulerOutput) -> int:
        return int(bool(plan.num_scheduled_tokens))

    def submit(self, plan: SchedulerOutput) -> None:
        try:
            self._steps.append(self._launcher.launch(plan))
        except BaseException as error:  # it belongs to this step, and is raised when the step is taken
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
    """For a synchronous device, a CPU."""
    return ThreadedPipeline(runner) if async_scheduling else InlinePipeline(runner)


def _execute(runner: Runner, plan: SchedulerOutput) -> StepResult:
    try:
        return StepResult(runner.execute(plan))
    except BaseException as error:  # the edge to the device: the caller of `take` decides what it means
        return StepResult(None, _as_error(error))


def _as_error(error: BaseException) -> Exception:
    """A panic of a foreign library is no Exception, and leaves the device in an unknown state."""
    if isinstance(error, Exception):
        return error
    lost = DeviceLostError(f"{type(error).__name__}: {error}")
    lost.__cause__ = error
    return lost
