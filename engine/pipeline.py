"""Where planned steps are computed: at once, on a separate thread, or by an asynchronous device.

Knows no scheduler. Plans are computed in the order in which they were submitted, and results are taken in that order.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.step import ModelRunnerOutput, SchedulerOutput


class DeviceLostError(RuntimeError):
    """The device is lost: it can compute no further step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a plan: the sampled tokens, or the error that the device raised."""

    output: ModelRunnerOutput | None
    error: Exception | None = None


class Launched(Protocol):
    """A step that a device computes."""

    def wait(self) -> ModelRunnerOutput: ...


class StepLauncher(Protocol):
    """Begins a step; an asynchronous device still computes it when `launch` returns."""

    def launch(self, plan: SchedulerOutput) -> Launched: ...


class Pipeline(Protocol):
    """Computes submitted plans in order, and returns their results in the same order."""

    def num_ahead(self, plan: SchedulerOutput) -> int:
        """How many steps may be under way while the scheduler makes the plan after this one."""
        ...

    def submit(self, plan: SchedulerOutput) -> None: ...

    def take_result(self) -> StepResult:
        """Waits for the result of the oldest plan whose result was not taken yet.

        There must be such a plan.
        """
        ...

    def close(self) -> None:
        """Ends after the step under way, and releases the runner. Afterwards no plan may be submitted.

        The runner must be released because NCCL can only end when no CUDA graph contains its calls."""
        ...


class ThreadedPipeline:
    """Computes on its own thread, so that a step can be planned while the previous one is computed."""

    def __init__(self, runner: StepLauncher) -> None:
        self._plans: queue.SimpleQueue[SchedulerOutput | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(runner,), name="device", daemon=True)
        self._thread.start()

    def num_ahead(self, plan: SchedulerOutput) -> int:
        """1 if each request of the step computes one token; 0 if the step has part of a prompt, or no tokens.

        A CPU computes prompt tokens so slowly that a step planned ahead saves hardly any time. And it costs time: a
        request that arrives during the current step would have to wait for the planned step, too.
        """
        return int(plan.total_num_scheduled_tokens == len(plan.num_scheduled_tokens) > 0)

    def submit(self, plan: SchedulerOutput) -> None:
        self._plans.put(plan)

    def take_result(self) -> StepResult:
        return self._results.get()

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()  # only the thread holds the runner

    def _run(self, runner: StepLauncher) -> None:
        while (plan := self._plans.get()) is not None:
            self._results.put(_result_of(lambda: runner.launch(plan).wait()))


class StreamPipeline:
    """Launches a step in `submit`, and waits for it in `take_result`.

    With `is_async`, the next step is launched while the device computes this one, so that the device never waits
    for the host. A CPU computes most of a step in `submit`.
    """

    def __init__(self, launcher: StepLauncher, *, is_async: bool = True) -> None:
        self._launcher = launcher
        self._is_async = is_async
        self._steps: deque[Launched | Exception] = deque()

    def num_ahead(self, plan: SchedulerOutput) -> int:
        return int(self._is_async and bool(plan.num_scheduled_tokens))

    def submit(self, plan: SchedulerOutput) -> None:
        try:
            self._steps.append(self._launcher.launch(plan))
        except BaseException as error:  # the error belongs to this step: `take_result` returns it
            self._steps.append(_as_error(error))

    def take_result(self) -> StepResult:
        step = self._steps.popleft()
        return StepResult(None, step) if isinstance(step, Exception) else _result_of(step.wait)

    def close(self) -> None:
        while self._steps:
            self.take_result()
        del self._launcher


def make_pipeline(runner: StepLauncher, *, async_scheduling: bool) -> Pipeline:
    """The pipeline of a CPU, which is a synchronous device."""
    return ThreadedPipeline(runner) if async_scheduling else StreamPipeline(runner, is_async=False)


def _result_of(compute: Callable[[], ModelRunnerOutput]) -> StepResult:
    """The result of `compute`, or the error that it raised. Device code may raise anything."""
    try:
        return StepResult(compute())
    except BaseException as error:
        return StepResult(None, _as_error(error))


def _as_error(error: BaseException) -> Exception:
    """The error itself if it is an Exception, else a DeviceLostError.

    A panic of a foreign library is no Exception, and leaves the device in an unknown state."""
    if isinstance(error, Exception):
        return error
    device_lost = DeviceLostError(f"{type(error).__name__}: {error}")
    device_lost.__cause__ = error
    return device_lost
