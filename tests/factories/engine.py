"""An engine without a device: real loop, core and scheduler, a fake runner, a scripted connector."""

import queue
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.clock import Clock, SystemClock
from baton.kv import WorkerRef
from baton.request import EngineRequest, RequestOutput
from baton.sampling import SamplingParams
from baton.step import KVConnectorOutput, SchedulerOutput
from baton.system.progress import Progress
from baton.worker import KVPeerCounts
from decode_worker import DecodeRole
from engine.grammars.compiler import GrammarCompiler
from engine.pipeline import Pipeline, StepLauncher, ThreadedPipeline, make_pipeline
from kv_transfer import BlockMover
from kv_transfer.connector.endpoint import COUNTERS
from scheduler import Scheduler
from simulator.device import Computed
from tests.factories.scheduling import EOS, FakeRunner, make_config
from worker.commands import CommandQueue
from worker.core import EngineCore
from worker.kv_connector_scheduler import KVConnectorScheduler
from worker.kv_events import KVChange
from worker.loop import EngineLoop, EngineSnapshot
from worker.role import Role
from worker.step_trace_writer import StepTraceWriter

VOCAB_SIZE = 100_000
"""The token ids of the fake model are below 50,100."""


@dataclass
class FakeBlockMover:
    """A connector that moves nothing. It reports what a test puts into `outputs`, and stores its commands."""

    outputs: list[KVConnectorOutput] = field(default_factory=list)
    commands: list[Any] = field(default_factory=list)
    is_shut_down: bool = False

    def get_finished(self) -> KVConnectorOutput:
        return self.outputs.pop(0) if self.outputs else KVConnectorOutput()

    def send_commands(self, metadata: Any) -> None:
        self.commands += metadata.at_once if metadata else ()

    def start_load_kv(self, metadata: Any) -> None:
        self.commands += metadata.loads if metadata else ()

    def save_kv_blocks(self, metadata: Any, preempted: Set[str]) -> None:
        self.commands += (
            [command for command in metadata.after if command.request_id not in preempted] if metadata else ()
        )

    def counters(self) -> dict[str, int]:
        return dict.fromkeys(COUNTERS, 0)

    def peers(self) -> tuple[KVPeerCounts, ...]:
        return ()

    def shutdown(self) -> None:
        self.is_shut_down = True


class StepHook:
    """A runner that calls a test before each step.

    An exception of the call counts as the device's failure.
    """

    def __init__(
        self, before_step: Callable[[SchedulerOutput], None], runner: FakeRunner | None = None
    ) -> None:
        self._runner = runner or FakeRunner()
        self._before_step = before_step

    def launch(self, plan: SchedulerOutput) -> Computed:
        if plan.num_scheduled_tokens:
            self._before_step(plan)
        return self._runner.launch(plan)


class Held:
    """A hook that stands still in its first step until it may go on; then each step takes `step_s`."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self._step_s = step_s

    def __call__(self, _: SchedulerOutput) -> None:
        self.entered.set()
        assert self.go_on.wait(60)
        threading.Event().wait(self._step_s)


class PlansPastPrompts(ThreadedPipeline):
    """Like a GPU's pipeline, plans the next step while any step with tokens is under way."""

    def num_ahead(self, plan: SchedulerOutput) -> int:
        return int(bool(plan.num_scheduled_tokens))


def make_grammars() -> GrammarCompiler:
    """A compiler for requests without a structured output. It has no tokenizer."""
    return GrammarCompiler(Path("no model"), VOCAB_SIZE, (EOS,), lambda: None, SystemClock())


def make_core(
    runner: StepLauncher | None = None,
    connector: BlockMover | None = None,
    clock: Clock | None = None,
    trace: StepTraceWriter | None = None,
    progress: Progress | None = None,
    pipeline: Pipeline | None = None,
    num_speculative_tokens: int = 0,
    **overrides: Any,
) -> EngineCore:
    """Makes a core. `pipeline` replaces the pipeline around `runner`."""
    config = make_config(**overrides)
    scheduler = Scheduler(
        config, KVConnectorScheduler(16), hash_key=b"k" * 16, num_speculative_tokens=num_speculative_tokens
    )
    return EngineCore(
        scheduler,
        pipeline or make_pipeline(runner or FakeRunner(), async_scheduling=config.async_scheduling),
        connector or FakeBlockMover(),
        make_grammars(),
        (EOS,),
        clock or SystemClock(),
        trace,
        progress,
    )


def make_engine_request(request_id: str = "r", num_tokens: int = 10, **options: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=options.pop("max_tokens", 4))
    prompt = options.pop("prompt_token_ids", (7,) * num_tokens)
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params, **options)


class RunningLoop:
    """An EngineLoop and its outbox, which stores what the loop delivers. A context manager."""

    def __init__(
        self, core: EngineCore | None = None, role: Role | None = None, *, lease_s: float = 0.1
    ) -> None:
        self.ref = WorkerRef("w0", "incarnation", ("tcp://127.0.0.1:1",), 16)
        """The name under which others may know the worker."""
        self.outputs: queue.Queue[tuple[str, RequestOutput]] = queue.Queue()
        self.kv_changes: queue.Queue[tuple[tuple[str, ...], KVChange]] = queue.Queue()
        self.beats: queue.Queue[EngineSnapshot] = queue.Queue()
        """The state of the engine at each heartbeat."""
        self.commands = CommandQueue()
        self.loop = EngineLoop(
            core or make_core(), role or DecodeRole(100), self, SystemClock(), lease_s, self.commands
        )

    def __enter__(self) -> "RunningLoop":
        others = threading.enumerate()
        self.loop.start()
        (self._thread,) = (
            each for each in threading.enumerate() if each.name == "engine" and each not in others
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.stop()

    def until_ended(self) -> None:
        """Waits for the engine's thread to end by itself."""
        self.loop._thread.join(60)

    def next_output(self) -> tuple[str, RequestOutput]:
        return self.outputs.get(timeout=60)

    def until_finished(self, request_id: str) -> RequestOutput:
        """Waits for the request's last output, and drops all outputs before it."""
        while True:
            _, output = self.next_output()
            if output.request_id == request_id and output.finish_reason is not None:
                return output

    def next_finish(self) -> RequestOutput:
        """Waits for the next output that ends a request."""
        while (output := self.next_output()[1]).finish_reason is None:
            continue
        return output

    def cpu_s(self) -> float:
        """What the engine's own thread has computed so far, in seconds."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    # Outbox

    def send(self, client_id: str, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.outputs.put((client_id, output))

    def send_kv_change(self, client_ids: tuple[str, ...], change: KVChange) -> None:
        self.kv_changes.put((client_ids, change))

    def beat(self) -> None:
        self.beats.put(self.loop.snapshot)
