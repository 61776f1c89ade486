"""Steps under way: their order, when the connector gets its commands, and what a device's failure leaves behind."""

import queue
import threading
import weakref
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest

from baton.clock import SystemClock
from baton.kv import KVTransferParams, TransferRole
from baton.request import ErrorKind, FinishReason, FirstToken, RequestOutput
from baton.step import CachedRequestData, KVConnectorOutput, ModelRunnerOutput, ReceivedKV, SchedulerOutput
from baton.worker import WorkerRole
from engine.pipeline import DeviceLostError, Pipeline, StepLauncher, StreamPipeline, ThreadedPipeline
from scheduler import RequestStatus
from simulator.device import Computed
from tests.factories.engine import (
    FakeBlockMover,
    PlansPastPrompts,
    StepHook,
    make_core,
    make_engine_request,
)
from tests.factories.scheduling import PEER, FakeRunner
from worker.core import MAX_FAILED_STEPS, EngineCore
from worker.device_check import CHECKING
from worker.step_trace import TraceHeader, read_trace
from worker.step_trace_writer import open_step_trace


def make_plan(step: int) -> SchedulerOutput:
    return SchedulerOutput((), CachedRequestData(), {}, 0, frozenset(), frozenset(), step=step)


class Echo:
    """Returns which step it computed, and fails at given steps."""

    def launch(self, plan: SchedulerOutput) -> Computed:
        if plan.step < 0:
            raise ValueError("the device is on fire")
        return Computed(ModelRunnerOutput({"step": [plan.step]}))


def synchronous(launcher: StepLauncher) -> Pipeline:
    return StreamPipeline(launcher, is_async=False)


@pytest.mark.parametrize("make", [synchronous, ThreadedPipeline])
def test_results_come_in_the_order_of_the_plans_and_errors_in_their_place(make: Any) -> None:
    pipeline: Pipeline = make(Echo())
    for step in (1, -1, 2):
        pipeline.submit(make_plan(step))
    first, failed, last = (pipeline.take_result() for _ in range(3))
    assert first.output is not None
    assert last.output is not None
    assert (first.output.sampled_token_ids, last.output.sampled_token_ids) == ({"step": [1]}, {"step": [2]})
    assert failed.output is None
    assert str(failed.error) == "the device is on fire"
    pipeline.close()


class FakeAsyncDevice:
    """An asynchronous device, which computes a step only when a test waits for it."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.done: list[int] = []

    def launch(self, plan: SchedulerOutput) -> "LaunchedStep":
        if plan.step == 0:
            raise ValueError("no room in the queue")
        self.launched.append(plan.step)
        return LaunchedStep(self, plan.step)


class LaunchedStep:
    def __init__(self, device: FakeAsyncDevice, step: int) -> None:
        self._device, self._step = device, step

    def wait(self) -> ModelRunnerOutput:
        self._device.done.append(self._step)
        if self._step < 0:
            raise ValueError("the device is on fire")
        return ModelRunnerOutput({"step": [self._step]})


def test_an_asynchronous_device_gets_its_commands_before_anything_waits() -> None:
    device = FakeAsyncDevice()
    pipeline = StreamPipeline(device)
    for step in (1, -1, 0, 2):
        pipeline.submit(make_plan(step))
    assert (device.launched, device.done) == ([1, -1, 2], [])
    results = [pipeline.take_result() for _ in range(3)]
    assert [result.output is None for result in results] == [False, True, True]
    assert [str(result.error) for result in results[1:]] == ["the device is on fire", "no room in the queue"]
    assert device.done == [1, -1]
    pipeline.close()
    assert device.done == [1, -1, 2], "memory of a step under way must not be given away"


@pytest.mark.parametrize("make", [StreamPipeline, ThreadedPipeline])
def test_a_closed_pipeline_lets_go_of_the_device(make: Any) -> None:
    """The device's CUDA graphs must be freed before NCCL can end."""
    runner = FakeAsyncDevice()
    is_held = weakref.ref(runner)
    pipeline: Pipeline = make(runner)
    del runner
    pipeline.close()
    assert is_held() is None


class Diary(FakeBlockMover):
    """A connector that records its calls, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, Any]] = []

    def send_commands(self, metadata: Any) -> None:
        self.entries.append(
            ("commands", [type(command).__name__ for command in metadata.at_once] if metadata else [])
        )

    def start_load_kv(self, metadata: Any) -> None:
        if metadata and metadata.loads:
            self.entries.append(("load", [command.request_id for command in metadata.loads]))

    def save_kv_blocks(self, metadata: Any, preempted: Set[str]) -> None:
        filled = (
            [command.request_id for command in metadata.after if command.request_id not in preempted]
            if metadata
            else []
        )
        self.entries.append(("save", filled))


class Gate:
    """A device whose steps end when a test says so."""

    def __init__(self) -> None:
        self._runner = FakeRunner()
        self.started: queue.Queue[int] = queue.Queue()
        self.may_end = threading.Semaphore(0)

    def launch(self, plan: SchedulerOutput) -> Computed:
        self.started.put(plan.step)
        assert self.may_end.acquire(timeout=60)
        return self._runner.launch(plan)


def step(core: EngineCore) -> list[RequestOutput]:
    return core.step().get("gateway", [])


def run_until_idle(core: EngineCore) -> list[RequestOutput]:
    outputs = step(core)
    while core.may_progress:
        outputs += step(core)
    return outputs


def test_the_second_step_is_planned_while_the_first_is_computed() -> None:
    gate = Gate()
    core = make_core(gate)
    core.add_request(make_engine_request(num_tokens=1, max_tokens=3), "gateway")
    assert step(core) == []
    assert gate.started.get(timeout=60) == 1
    gate.may_end.release()
    assert [output.token_ids for output in step(core)] != [()], (
        "the second was planned before the first ended"
    )
    assert gate.started.get(timeout=60) == 2
    gate.may_end.release(10)
    run_until_idle(core)
    core.close()


def test_no_step_is_planned_past_a_prompt_so_that_a_newcomer_waits_for_one_only() -> None:
    planned: list[dict[str, int]] = []
    hook = StepHook(lambda plan: planned.append(dict(plan.num_scheduled_tokens)))
    core = make_core(hook, max_num_batched_tokens=16)
    core.add_request(make_engine_request("long", num_tokens=40), "gateway")
    step(core)
    core.add_request(make_engine_request("short", num_tokens=3), "gateway")
    assert planned == [{"long": 16}], "the next step may still hold the newcomer"
    run_until_idle(core)
    core.close()


def test_c46_a_load_starts_when_the_steps_before_it_are_computed_and_commands_go_at_once() -> None:
    diary = Diary()
    core = make_core(connector=diary)
    core.add_request(make_engine_request("local", num_tokens=1, max_tokens=9), "gateway")
    step(core)
    transfer = KVTransferParams(TransferRole.CONSUMER, "t", 0, PEER)
    core.add_request(make_engine_request("load", kv_transfer=transfer), "gateway")
    diary.entries.clear()
    step(core)
    assert diary.entries == [("commands", ["BeginLoad"]), ("save", []), ("load", ["load"])]
    received = ReceivedKV("load", FirstToken(7, None), 1, 0.1, 0.1)
    diary.outputs.append(KVConnectorOutput(finished_recving=(received,)))
    run_until_idle(core)
    core.close()


def test_c46_blocks_of_a_request_that_was_preempted_meanwhile_do_not_leave() -> None:
    diary = Diary()
    pipeline = PlansPastPrompts(FakeRunner())
    settings: dict[str, Any] = {"num_blocks": 8, "max_num_batched_tokens": 48, "enable_prefix_caching": False}
    core = make_core(connector=diary, pipeline=pipeline, **settings)
    transfer = KVTransferParams(TransferRole.PRODUCER, "t", 0, PEER)
    core.add_request(make_engine_request("old", num_tokens=31, max_tokens=40), "gateway")
    step(core)
    core.add_request(make_engine_request("young", num_tokens=80, kv_transfer=transfer), "gateway")
    diary.entries.clear()
    for _ in range(3):
        step(core)
    index = diary.entries.index(("commands", ["WithdrawBlocks", "NoteStarvation"]))
    assert diary.entries[index + 1] == ("save", []), "the step under way was to fill blocks of the victim"
    core.finish_requests(["old", "young"], RequestStatus.FINISHED_ABORTED)
    core.close()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_failed_step_ends_the_only_request_and_the_engine_goes_on(async_scheduling: bool) -> None:
    def fail_on_second(plan: SchedulerOutput) -> None:
        if plan.step == 2:
            raise ValueError("the device is on fire")

    core = make_core(StepHook(fail_on_second), async_scheduling=async_scheduling)
    core.add_request(make_engine_request("a", max_tokens=9), "gateway")
    outputs: list[RequestOutput] = []
    outputs += run_until_idle(core)
    assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.ERROR]
    core.add_request(make_engine_request("b", max_tokens=9), "gateway")
    outputs += run_until_idle(core)
    assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.ERROR, FinishReason.LENGTH]
    assert sum(len(output.token_ids) for output in outputs if output.request_id == "b") == 9
    blocks = core.scheduler.kv_block_counts()
    assert blocks.free == blocks.total
    core.close()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_device_that_fails_step_after_step_ends_the_engine(async_scheduling: bool) -> None:
    def fail(plan: SchedulerOutput) -> None:
        if CHECKING not in plan.num_scheduled_tokens:
            raise ValueError("the device is on fire")

    core = make_core(StepHook(fail), async_scheduling=async_scheduling)
    with pytest.raises(RuntimeError, match=f"failed to compute {MAX_FAILED_STEPS} steps in a row"):  # noqa: PT012
        for number in range(MAX_FAILED_STEPS):
            core.add_request(make_engine_request(f"r{number}"), "gateway")
            run_until_idle(core)
    core.close()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_device_that_fails_a_known_token_too_is_unfit_and_gives_the_request_back(
    async_scheduling: bool,
) -> None:
    def fail(_: SchedulerOutput) -> None:
        raise ValueError("the device is on fire")

    core = make_core(StepHook(fail), async_scheduling=async_scheduling)
    core.add_request(make_engine_request("a"), "gateway")
    assert [output.error_kind for output in run_until_idle(core)] == [ErrorKind.GIVEN_BACK]
    assert core.health.unfit_reason == (
        "the device failed to compute a step (the device is on fire); the device check also failed: "
        "ValueError: the device is on fire"
    )
    core.close()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_device_that_is_lost_ends_the_engine_at_once(async_scheduling: bool) -> None:
    def fail(_: SchedulerOutput) -> None:
        raise DeviceLostError("an illegal memory access was encountered")

    core = make_core(StepHook(fail), async_scheduling=async_scheduling)
    core.add_request(make_engine_request("a"), "gateway")
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        run_until_idle(core)
    core.close()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_every_step_is_traced_also_those_that_fail_with_another(
    tmp_path: Path, async_scheduling: bool
) -> None:
    def fail_on_third(plan: SchedulerOutput) -> None:
        if plan.step == 3:
            raise ValueError("the device is on fire")

    header = TraceHeader(
        worker="d0",
        incarnation="incarnation",
        role=WorkerRole.DECODE,
        began_unix_s=0.0,
        max_num_batched_tokens=1024,
        num_blocks=100,
        block_size=16,
    )
    trace = open_step_trace(str(tmp_path), header, SystemClock(), 2**20)
    assert trace is not None
    core = make_core(StepHook(fail_on_third), trace=trace, async_scheduling=async_scheduling)
    core.add_request(make_engine_request("failed", max_tokens=9), "gateway")
    run_until_idle(core)
    core.add_request(make_engine_request("done", max_tokens=2), "gateway")
    core.add_request(make_engine_request("aborted", max_tokens=9), "gateway")
    step(core)
    core.finish_requests(["aborted"], RequestStatus.FINISHED_ABORTED)
    run_until_idle(core)
    core.close()
    steps = read_trace(tmp_path / "d0-incarnation.jsonl").steps
    ends = {request_id: reason for traced in steps for request_id, reason in traced.ended.items()}
    assert ends == {
        "failed": FinishReason.ERROR,
        "done": FinishReason.LENGTH,
        "aborted": FinishReason.ABORT,
    }
    assert [traced.step for traced in steps] == sorted({traced.step for traced in steps})
    assert all(traced.done_s is not None for traced in steps)
    num_sampled = sum(share.num_sampled for traced in steps for share in traced.scheduled.values())
    assert num_sampled >= 4
