"""EngineCore: introduces scheduler, runner and connector to one another and moves all three by one step.

Knows no thread, no socket and no role; `engine/loop.py` owns the thread it runs on.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from baton.clock import Clock
from baton.request import EngineRequest, RequestOutput
from baton.step import EngineCoreOutputs, KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from baton.worker import KVBlockCounts, RequestCounts
from engine.stages import StageTimer
from scheduler import Request, RequestStatus, Scheduler

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3

ClientOutputs = dict[str, list[RequestOutput]]


class Runner(Protocol):
    """Computes a plan on a device; returns when the sampled tokens are known."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput: ...


class ConnectorWorker(Protocol):
    """The half of the KV connector that moves bytes. No call blocks, and no peer can make one raise."""

    def get_finished(self) -> KVConnectorOutput: ...

    def start_load_kv(self, metadata: Any) -> None:
        """Before the forward pass: loads to start, hand-overs to finish, transfers to give up."""
        ...

    def save_kv_blocks(self, metadata: Any) -> None:
        """After the forward pass: the blocks it filled may leave."""
        ...

    def counters(self) -> dict[str, int]: ...


class EngineCore:
    """One device's work, one step at a time. Every method belongs to the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        connector: ConnectorWorker,
        eos_token_ids: tuple[int, ...],
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._connector = connector
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._stages = StageTimer(clock)
        self._num_failed_steps = 0
        self.may_progress = False
        """Whether another step right now could do more; if not, only news from outside can change that."""

    def step(self) -> ClientOutputs:
        """Takes in what transfers brought, schedules, runs, and returns the news by client."""
        news = self._connector.get_finished()
        self._stages.received(news.finished_recving)
        outputs: ClientOutputs = defaultdict(list)
        self._stamp(self._scheduler.update_connector_output(news), outputs)
        plan = self._scheduler.schedule()
        self._stages.planned(plan)
        self._stamp(self._run(plan), outputs)
        self.may_progress = bool(
            plan.num_scheduled_tokens or plan.preempted_req_ids or plan.kv_connector_metadata is not None
        )
        return outputs

    def add_request(self, request: EngineRequest, client_id: str) -> None:
        """Queues a request; raises InvalidRequest if this engine could never run it."""
        self._scheduler.add_request(
            Request(
                request.request_id,
                request.prompt_token_ids,
                request.sampling_params,
                arrival_time=self._clock.now(),
                priority=request.priority,
                eos_token_ids=self._eos_token_ids,
                client_id=client_id,
                cache_salt=request.cache_salt,
                kv_transfer=request.kv_transfer,
            )
        )
        self._stages.arrived(request.request_id)

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus, error: str | None = None
    ) -> ClientOutputs:
        """Ends requests in whatever state they are; unknown and finished ones are ignored."""
        self.may_progress = True  # the runner and the connector have to hear of it
        outputs: ClientOutputs = defaultdict(list)
        self._stamp(self._scheduler.finish_requests(request_ids, status, error), outputs)
        return outputs

    def request_counts(self) -> RequestCounts:
        return self._scheduler.request_counts()

    def kv_block_counts(self) -> KVBlockCounts:
        return self._scheduler.kv_block_counts()

    def counters(self) -> dict[str, int]:
        return {**self._scheduler.counters(), **self._connector.counters()}

    def _run(self, plan: SchedulerOutput) -> dict[str, EngineCoreOutputs]:
        self._connector.start_load_kv(plan.kv_connector_metadata)
        try:
            result = self._runner.execute(plan)
        except Exception:  # the edge to the device: one bad step must not end the worker
            return self._fail()
        if plan.num_scheduled_tokens:
            self._num_failed_steps = 0
        self._connector.save_kv_blocks(plan.kv_connector_metadata)
        return self._scheduler.update_from_output(plan, result)

    def _fail(self) -> dict[str, EngineCoreOutputs]:
        """Ends every request: some hit blocks that the plan promised and nobody computed; those are forgotten."""
        self._num_failed_steps += 1
        logger.exception("%d step(s) in a row failed; every request ends", self._num_failed_steps)
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise
        outputs = self._scheduler.finish_requests(
            self._scheduler.request_ids, RequestStatus.FINISHED_ERROR, "the device failed to compute a step"
        )
        self._scheduler.reset_prefix_cache(force=True)
        return outputs

    def _stamp(self, news: dict[str, EngineCoreOutputs], outputs: ClientOutputs) -> None:
        """Adds what has just happened to `outputs`, with the stages of every request that ended."""
        for client_id, part in news.items():
            for output in part.outputs:
                stages = self._stages.produced(output)
                outputs[client_id].append(replace(output, stage_times=stages) if stages else output)
