"""The writer: every step is in the file at once, complete, in order and only once. No failure costs the engine a
step."""

import io
import logging
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from baton.clock import VirtualClock
from baton.errors import ConfigError
from baton.kv import TransferRole
from baton.request import FinishReason
from baton.step import ClientOutputs, SchedulerOutput
from scheduler import RequestStatus, Scheduler
from tests.factories.scheduling import (
    EOS,
    FakeConnector,
    FakeRunner,
    flatten,
    make_request,
    make_scheduler,
    received,
    token_at,
)
from tests.factories.traces import make_header
from worker.step_trace import StepTrace, TraceEnd, TraceHeader, encode_header, read_trace
from worker.step_trace_writer import StepTraceWriter, open_step_trace

ROOT = Path(__file__).resolve().parents[3]
HEADER = make_header("d0")
IDLE = make_scheduler()
PLENTY = 2**20


def open_trace(
    folder: Path, header: TraceHeader = HEADER, clock: VirtualClock | None = None, max_bytes: int = PLENTY
) -> StepTraceWriter:
    writer = open_step_trace(str(folder), header, clock or VirtualClock(), max_bytes)
    assert writer is not None
    return writer


class TracedEngine:
    """A scheduler over a fake runner, written down as the engine does it; a step takes a second."""

    def __init__(self, folder: Path, scheduler: Scheduler, runner: FakeRunner, num_ahead: int = 0) -> None:
        self.clock = VirtualClock(100.0)
        self.scheduler = scheduler
        self.writer = open_trace(folder, clock=self.clock)
        self.path = folder / "d0-incarnation.jsonl"
        self._runner = runner
        self._num_ahead = num_ahead
        self._under_way: deque[SchedulerOutput] = deque()

    def step(self) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        self.writer.planned(plan, self.scheduler)
        self._under_way.append(plan)
        while len(self._under_way) > (self._num_ahead if plan.num_scheduled_tokens else 0):
            oldest = self._under_way.popleft()
            output = self._runner.execute(oldest)
            self.clock.advance(1.0)
            news = self.scheduler.update_from_output(oldest, output)
            self.writer.done(oldest.step, output.sampled_token_ids, news)
        return plan

    def abort(self, *request_ids: str) -> None:
        self.writer.ended(self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED))

    def run(self) -> tuple[StepTrace, ...]:
        while self.scheduler.has_requests():
            self.step()
        self.step()
        return self.steps()

    def steps(self) -> tuple[StepTrace, ...]:
        return read_trace(self.path).steps


Start = Callable[..., TracedEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a traced engine: scheduler, runner, steps under way."""
    engines: list[TracedEngine] = []

    def start_one(*arguments: Any, **values: Any) -> TracedEngine:
        engines.append(TracedEngine(tmp_path, *arguments, **values))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.writer.close()


def test_c61_drafts_are_traced_with_what_became_of_them(start: Start) -> None:
    def half_right(request_id: str, position: int) -> tuple[int, ...]:
        return token_at(request_id, position), 7

    engine = start(make_scheduler(num_speculative_tokens=2), FakeRunner(guess=half_right))
    engine.scheduler.add_request(make_request(10, request_id="r", max_tokens=4))
    prompt, first, second = engine.run()
    assert (prompt.num_drafts, prompt.scheduled["r"].num_sampled) == ({}, 1)
    assert (first.num_drafts, first.scheduled["r"]) == ({"r": 2}, (3, 10, 2))
    assert (second.num_drafts, second.scheduled["r"]) == ({"r": 2}, (3, 12, 2))


def make_plan(step: int) -> SchedulerOutput:
    """The prompt of a new request."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request(4, request_id=f"r{step}"))
    return replace(scheduler.schedule(), step=step)


def open_writer(file: io.RawIOBase, max_bytes: int = PLENTY) -> StepTraceWriter:
    return StepTraceWriter(cast("BinaryIO", file), Path("d0.jsonl"), HEADER, VirtualClock(), max_bytes)


def test_a_request_from_its_arrival_to_its_end(start: Start) -> None:
    engine = start(make_scheduler(max_num_batched_tokens=48), FakeRunner())
    engine.scheduler.add_request(make_request(60, request_id="a", max_tokens=2))
    engine.scheduler.add_request(make_request(20, request_id="b", max_tokens=1))
    first, second, third = engine.run()
    assert (first.step, first.planned_s, first.done_s) == (1, 0.0, 1.0)
    assert first.scheduled == {"a": (48, 0, 0)}
    assert first.num_prompt_tokens == {"a": 60}
    assert (first.waiting, first.num_waiting, first.num_free_blocks) == (("b",), 1, 97)
    assert second.scheduled == {"a": (12, 48, 1), "b": (20, 0, 1)}
    assert (second.ended, second.num_waiting) == ({"b": FinishReason.LENGTH}, 0)
    assert third.scheduled == {"a": (1, 60, 1)}
    assert third.ended == {"a": FinishReason.LENGTH}


def test_prefix_hits_count_as_computed_before(start: Start) -> None:
    engine = start(make_scheduler(), FakeRunner())
    prompt = range(1000, 1040)
    engine.scheduler.add_request(make_request(request_id="a", prompt=prompt, max_tokens=1))
    engine.step()
    engine.scheduler.add_request(make_request(request_id="b", prompt=prompt, max_tokens=1))
    engine.step()
    first, second = engine.steps()
    assert first.num_cached_tokens == {}
    assert second.num_cached_tokens == {"b": 32}
    assert second.scheduled == {"b": (8, 32, 1)}


def run_with_a_preemption(start: Start, **config: Any) -> tuple[StepTrace, StepTrace]:
    """The step that preempts the younger of two requests, and the one that resumes it."""
    engine = start(make_scheduler(num_blocks=8, **config), FakeRunner())
    engine.scheduler.add_request(make_request(48, request_id="old", max_tokens=30))
    engine.scheduler.add_request(make_request(30, request_id="young", max_tokens=20))
    steps = engine.run()
    (preempted,) = [step for step in steps if step.preempted]
    (resumed,) = [step for step in steps if step.resumed]
    assert preempted.preempted == preempted.waiting == resumed.resumed == ("young",)
    before = [step.scheduled["young"] for step in steps[: preempted.step - 1]]
    num_tokens, num_computed_tokens, _ = resumed.scheduled["young"]
    assert num_tokens + num_computed_tokens == 30 + sum(share.num_sampled for share in before)
    return preempted, resumed


def test_a_preempted_request_may_find_some_of_its_blocks_again(start: Start) -> None:
    preempted, resumed = run_with_a_preemption(start)
    assert (preempted.num_swapped_out, resumed.num_swapped_in) == (0, 0)
    assert resumed.num_cached_tokens.get("young", 0) == resumed.scheduled["young"].num_computed_tokens


def test_what_comes_back_from_host_memory_is_no_prefix_hit(start: Start) -> None:
    preempted, resumed = run_with_a_preemption(
        start, preemption="swap", num_swap_blocks=8, enable_prefix_caching=False
    )
    num_computed_tokens = resumed.scheduled["young"].num_computed_tokens
    assert preempted.num_swapped_out == resumed.num_swapped_in == -(-num_computed_tokens // 16) > 0
    assert resumed.num_cached_tokens == {}


def test_a_prompt_from_another_worker_is_no_prefix_hit(start: Start) -> None:
    connector = FakeConnector()
    engine = start(make_scheduler(connector), FakeRunner(memory=connector.memory))
    request = make_request(40, request_id="a", max_tokens=2, role=TransferRole.CONSUMER)
    engine.scheduler.add_request(request)
    engine.step()
    engine.step()  # nothing new
    engine.writer.ended(engine.scheduler.update_connector_output(received(request)))
    loading, decode = engine.run()
    assert (loading.scheduled, loading.loading) == ({}, ("a",))
    assert (decode.step, decode.scheduled, decode.loading) == (3, {"a": (1, 40, 1)}, ())
    assert (decode.num_prompt_tokens, decode.num_cached_tokens) == ({"a": 40}, {})


def test_outputs_of_a_request_that_moved_here_are_found_in_the_cache_like_its_prompt(start: Start) -> None:
    engine = start(make_scheduler(), FakeRunner())
    outputs = [token_at("a", position) for position in range(9)]
    engine.scheduler.add_request(make_request(prompt=[5] * 40, request_id="a", max_tokens=10))
    engine.run()
    moved = make_request(prompt=[5] * 40, request_id="a", max_tokens=10, output_token_ids=outputs)
    engine.scheduler.add_request(moved)
    last = engine.run()[-1]
    assert (last.scheduled, last.num_cached_tokens) == ({"a": (1, 48, 1)}, {"a": 48})


def test_with_steps_under_way_each_record_is_completed_by_its_number(start: Start) -> None:
    def stop_third(request_id: str, position: int) -> int:
        return EOS if (request_id, position) == ("a", 2) else token_at(request_id, position)

    scheduler = make_scheduler(async_scheduling=True)
    engine = start(scheduler, FakeRunner(stop_third), num_ahead=1)
    engine.scheduler.add_request(make_request(10, request_id="a"))
    engine.scheduler.add_request(make_request(10, request_id="b", max_tokens=6))
    steps = engine.run()
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step.planned_s for step in steps] == [0.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    assert [step.done_s for step in steps] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [step.step for step in steps if "a" in step.ended] == [3]
    assert [step.step for step in steps if "a" in step.scheduled] == [1, 2, 3, 4], "the last one in vain"


def test_who_ends_between_two_steps_ended_before_the_next(start: Start) -> None:
    engine = start(make_scheduler(max_num_seqs=1), FakeRunner())
    for request_id in ("runs", "waits"):
        engine.scheduler.add_request(make_request(request_id=request_id))
    engine.step()
    engine.abort("waits", "runs", "unknown")
    _, second = engine.run()
    assert second.ended == {"waits": FinishReason.ABORT, "runs": FinishReason.ABORT}
    assert (second.scheduled, second.num_waiting) == ({}, 0)


def test_a_step_is_in_the_file_as_soon_as_it_is_done(start: Start) -> None:
    engine = start(make_scheduler(), FakeRunner())
    engine.scheduler.add_request(make_request(request_id="a", max_tokens=3))
    for number in (1, 2, 3):
        engine.step()
        assert [step.step for step in engine.steps()][-1] == number
    assert read_trace(engine.path).end is TraceEnd.OPEN


def test_closing_writes_what_is_under_way_and_the_last_word(tmp_path: Path) -> None:
    writer = open_trace(tmp_path)
    writer.planned(make_plan(1), IDLE)
    writer.close()
    writer.close()
    trace = read_trace(tmp_path / "d0-incarnation.jsonl")
    assert trace.end is TraceEnd.CLOSED
    assert [(step.step, step.done_s) for step in trace.steps] == [(1, None)]


def test_a_file_never_outgrows_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = open_trace(tmp_path, max_bytes=800)
    for number in range(1, 50):
        writer.planned(make_plan(number), IDLE)
        writer.done(number, {}, ClientOutputs())
    writer.close()
    path = tmp_path / "d0-incarnation.jsonl"
    assert 600 < path.stat().st_size <= 800
    trace = read_trace(path)
    assert trace.end is TraceEnd.FULL
    assert [step.step for step in trace.steps] == list(range(1, len(trace.steps) + 1))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "limit of 800 bytes" in caplog.text


class FullDisk(io.RawIOBase):
    """Has room for so many bytes; then it fails as ENOSPC does, or takes what still fits."""

    def __init__(self, num_bytes: int, *, takes_parts: bool) -> None:
        self._num_bytes = num_bytes
        self._takes_parts = takes_parts
        self.num_writes = 0

    def write(self, data: Any) -> int:
        self.num_writes += 1
        if len(data) > self._num_bytes and not self._takes_parts:
            raise OSError(28, "No space left on device")
        num_written = min(len(data), self._num_bytes)
        self._num_bytes -= num_written
        return num_written


@pytest.mark.parametrize("takes_parts", [True, False])
def test_a_full_disk_is_said_once_and_ends_only_the_trace(
    caplog: pytest.LogCaptureFixture, takes_parts: bool
) -> None:
    disk = FullDisk(len(encode_header(HEADER)) + 300, takes_parts=takes_parts)
    writer = open_writer(disk)
    for number in range(1, 20):
        writer.planned(make_plan(number), IDLE)
        writer.ended(ClientOutputs())
        writer.done(number, {}, ClientOutputs())
    writer.close()
    assert disk.closed
    assert disk.num_writes < 10
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "ends here" in caplog.text


def test_a_file_that_ends_while_it_is_closed_ends_only_the_trace(tmp_path: Path) -> None:
    writer = open_trace(tmp_path, max_bytes=len(encode_header(HEADER)) + 50)
    writer.planned(make_plan(1), IDLE)
    writer.planned(make_plan(2), IDLE)
    writer.close()
    assert read_trace(tmp_path / "d0-incarnation.jsonl").end is TraceEnd.FULL


def test_results_without_a_plan_are_ignored(tmp_path: Path) -> None:
    writer = open_trace(tmp_path)
    writer.done(7, {}, ClientOutputs())
    writer.close()
    assert read_trace(tmp_path / "d0-incarnation.jsonl").steps == ()


@pytest.mark.parametrize(
    "occupy",
    [
        lambda path: path.write_text("a file"),
        lambda path: (path / "d0-incarnation.jsonl").mkdir(parents=True),
    ],
)
def test_a_folder_that_cannot_be_written_is_a_config_error(
    tmp_path: Path, occupy: Callable[[Path], object]
) -> None:
    folder = tmp_path / "traces"
    occupy(folder)
    with pytest.raises(ConfigError, match=f"engine.trace_dir: got '{folder}', but .* cannot be written"):
        open_step_trace(str(folder), HEADER, VirtualClock(), PLENTY)


@pytest.mark.parametrize("takes_parts", [True, False])
def test_a_full_disk_at_the_start_leaves_a_worker_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, takes_parts: bool
) -> None:
    """Otherwise the traces of dead workers would keep their replacements from starting."""

    def open_on_full_disk(path: Path, *_: Any, **__: Any) -> FullDisk:
        path.touch()
        return FullDisk(10, takes_parts=takes_parts)

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    assert open_step_trace(str(tmp_path), HEADER, VirtualClock(), PLENTY) is None
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert f"the trace {tmp_path / 'd0-incarnation.jsonl'}, so this worker runs without one" in caplog.text
    assert not list(tmp_path.iterdir())


def test_every_start_has_a_file_of_its_own(tmp_path: Path) -> None:
    for incarnation in ("one", "two"):
        header = make_header("p0", incarnation=incarnation)
        open_trace(tmp_path / "deep" / "er", header).close()
    names = sorted(path.name for path in (tmp_path / "deep" / "er").iterdir())
    assert names == ["p0-one.jsonl", "p0-two.jsonl"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.worker.test_step_trace_writer import *
engine = TracedEngine(Path(sys.argv[1]), make_scheduler(), FakeRunner())
engine.scheduler.add_request(make_request(request_id="a", max_tokens=9))
for _ in range(3):
    engine.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_after_kill_nine_every_step_that_was_done_is_there(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=120, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    trace = read_trace(tmp_path / "d0-incarnation.jsonl")
    assert ([step.step for step in trace.steps], trace.end) == ([1, 2, 3], TraceEnd.OPEN)


def test_outputs_that_are_no_ends_end_nothing(start: Start) -> None:
    engine = start(make_scheduler(), FakeRunner())
    engine.scheduler.add_request(make_request(request_id="a", max_tokens=3))
    plan = engine.scheduler.schedule()
    engine.writer.planned(plan, IDLE)
    news = engine.scheduler.update_from_output(plan, FakeRunner().execute(plan))
    assert [output.finish_reason for output in flatten(news)] == [None]
    engine.writer.done(plan.step, {"a": [5]}, news)
    (step,) = engine.steps()
    assert (step.ended, step.scheduled["a"].num_sampled) == ({}, 1)
