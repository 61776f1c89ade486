"""A worker's engine without its planes: the real loop, core and scheduler over a runner.

A prompt may count as handed over: its blocks are reserved and assumed to be loaded, whatever they contain. So
decoding can be measured at any context without computing a prompt.
"""

import threading
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from statistics import median

from baton.clock import SystemClock
from baton.config import SchedulerConfig
from baton.kv import KVTransferParams, TransferRole, WorkerRef
from baton.request import EngineRequest, FirstToken, RequestOutput
from baton.sampling import SamplingParams
from baton.step import KVConnectorOutput, ReceivedKV
from baton.worker import KVPeerCounts
from benchmarks.gpu.build import device_engine
from benchmarks.gpu.measure import make_recorder
from benchmarks.gpu.setting import Setting
from decode_worker import DecodeRole
from engine.batch import StepLimits
from engine.gpu.graphs import decode_sizes
from engine.grammars.compiler import GrammarCompiler
from engine.loading.loader import LoadedModel
from engine.pipeline import StreamPipeline
from engine.runner import ModelRunner
from kv_transfer import KVConnectorMetadata
from scheduler import Scheduler
from worker.commands import CommandQueue
from worker.core import EngineCore
from worker.kv_connector_scheduler import KVConnectorScheduler
from worker.kv_events import KVChange
from worker.loop import EngineLoop

PATIENCE_S = 300.0
NO_PEER = WorkerRef("no-peer", "1", ("tcp://127.0.0.1:1",), 1)
_ids = count()


class InstantLoads:
    """Satisfies kv_transfer.BlockMover. Every load is complete at once."""

    def __init__(self) -> None:
        self._received: list[ReceivedKV] = []

    def get_finished(self) -> KVConnectorOutput:
        received, self._received = tuple(self._received), []
        return KVConnectorOutput(finished_recving=received)

    def send_commands(self, metadata: KVConnectorMetadata | None) -> None:
        """Does nothing: there is no peer."""

    def start_load_kv(self, metadata: KVConnectorMetadata | None) -> None:
        for load in metadata.loads if metadata else ():
            self._received.append(ReceivedKV(load.request_id, FirstToken(0, None), 0, 0.0, 0.0))

    def save_kv_blocks(self, metadata: KVConnectorMetadata | None, preempted: Set[str]) -> None:
        """Does nothing: there is no consumer."""

    def counters(self) -> dict[str, int]:
        return {}

    def peers(self) -> tuple[KVPeerCounts, ...]:
        return ()

    def shutdown(self) -> None:
        """Does nothing: no transfer is under way."""


@dataclass(slots=True)
class Outcome:
    """The results of some requests, in the order in which the requests were given."""

    tokens: list[list[int]]
    times: list[float] = field(default_factory=list)
    """The time at which each step's outputs arrived."""
    counts: list[int] = field(default_factory=list)
    """The number of requests with outputs in each step."""

    @property
    def full_step_s(self) -> float:
        """The median time of a step with all requests, without the first and last of these steps."""
        most = max(self.counts)
        full = [time_s for time_s, num in zip(self.times, self.counts, strict=True) if num == most][2:-1]
        return median(later - earlier for earlier, later in pairwise(full))


class LoopedEngine:
    """One engine loop; requests come from one client. A context manager."""

    def __init__(self, runner: ModelRunner, config: SchedulerConfig, vocab_size: int) -> None:
        clock = SystemClock()
        self._outcome = Outcome([])
        self._index_of: dict[str, int] = {}
        self._num_missing = 0
        self._done = threading.Event()
        self._error: str | None = None
        self._core = EngineCore(
            Scheduler(config, KVConnectorScheduler(config.block_size)),
            StreamPipeline(runner, is_async=config.async_scheduling),
            InstantLoads(),
            GrammarCompiler(Path("unused"), vocab_size, (), lambda: None, clock),
            (),
            clock,
        )
        self._loop = EngineLoop(
            self._core, DecodeRole(1_000_000), self, clock, lease_s=0.0, commands=CommandQueue()
        )

    def __enter__(self) -> "LoopedEngine":
        self._loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.stop()

    def run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, loaded: bool = False
    ) -> Outcome:
        """Runs all requests at once to their ends.

        With `loaded`, the prompts count as handed over with token 0.
        """
        self._outcome = Outcome([[] for _ in prompts])
        self._index_of, self._num_missing = {}, len(prompts)
        self._done.clear()
        requests = [self._request(*each, loaded) for each in zip(prompts, params, strict=True)]
        self._index_of = {request.request_id: index for index, request in enumerate(requests)}
        for request in requests:
            self._loop.submit("check", request)
        assert self._done.wait(PATIENCE_S), f"{self._num_missing} requests did not end in {PATIENCE_S} s"
        assert self._error is None, self._error
        return self._outcome

    @property
    def counters(self) -> Mapping[str, int]:
        return self._loop.snapshot.counters

    def _request(self, prompt: Sequence[int], params: SamplingParams, loaded: bool) -> EngineRequest:
        number = next(_ids)
        load = KVTransferParams(TransferRole.CONSUMER, f"t{number}", 0, NO_PEER) if loaded else None
        return EngineRequest(
            request_id=f"r{number}",
            prompt_token_ids=tuple(prompt),
            sampling_params=params,
            kv_transfer=load,
        )

    def send(self, client_id: str, outputs: list[RequestOutput]) -> None:
        """Receives outputs. Runs on the engine's thread, after every step."""
        assert client_id == "check"
        self._outcome.times.append(time.perf_counter())
        self._outcome.counts.append(len(outputs))
        for output in outputs:
            self._outcome.tokens[self._index_of[output.request_id]] += output.token_ids
            if output.finish_reason is not None:
                self._error = self._error or output.error
                self._num_missing -= 1
        if self._num_missing == 0:
            self._done.set()

    def send_kv_change(self, client_ids: tuple[str, ...], change: KVChange) -> None:
        """Does nothing: there are no subscribers."""

    def beat(self) -> None:
        """Does nothing: there are no heartbeats."""


def recorded_loop(
    setting: Setting, model: LoadedModel, num_requests: int, length: int, block_size: int, chunk: int
) -> LoopedEngine:
    """A loop for up to `num_requests` requests at once, each of at most `length` tokens. Decode steps of any number of
    requests have graphs."""
    num_blocks = 2 + num_requests * -(-length // block_size)
    limits = StepLimits(num_requests, chunk, length)
    recorder, sizes = make_recorder(setting.device), decode_sizes(num_requests)
    engine = device_engine(setting, model, num_blocks, block_size, limits, recorder, sizes)
    config = SchedulerConfig(
        max_num_seqs=num_requests,
        max_num_batched_tokens=chunk,
        max_model_len=length,
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=False,
    )
    return LoopedEngine(engine.runner, config, model.vocab_size)
