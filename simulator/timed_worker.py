"""TimedWorker: the real scheduler with its block pool and its KV events, over a device that only takes time."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from baton.config import SchedulerConfig
from baton.kv import WorkerRef
from baton.messages.request_plane import KVEvents
from baton.request import EngineRequest, FinishReason, FirstToken, OnPreemption, RequestOutput
from baton.step import KVConnectorOutput, ModelRunnerOutput, ReceivedKV, SchedulerOutput
from baton.worker import WorkerLoad, WorkerRole, WorkerState, WorkerStatus
from scheduler import Request, Scheduler
from scheduler.request import RequestStatus
from worker.kv_events import merge_events
from worker.load import LoadMeter

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 1024
BYTES_PER_TOKEN = 131_072
"""KV of an 8B model in bfloat16."""
LINK_BYTES_PER_S = 5e9

STEP_S = 0.008
PREFILL_TOKEN_S = 0.0001
DECODE_REQUEST_S = 0.0001
"""Times of an empty step, of each prompt token and of each decoding request: about an 8B model on one GPU."""


@dataclass(slots=True)
class TimedRequest:
    """A request on this worker, and its future answer."""

    request: Request
    answer: tuple[int, ...]
    began_at: float | None = None
    """When its first step began."""


TimedOutputs = list[tuple[TimedRequest, RequestOutput]]


class CountingConnector:
    """The scheduler half of a connector that moves no blocks: it reports each load, and keeps unread blocks."""

    def __init__(self, start_load: Callable[[str, int], None]) -> None:
        self._start_load = start_load

    def request_added(self, request: Request) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        return request.num_initial_tokens - num_computed_tokens

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[int, ...], num_external_tokens: int
    ) -> None:
        self._start_load(request.request_id, num_external_tokens)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return None

    def request_finished(self, request: Request, block_ids: tuple[int, ...]) -> bool:
        return request.is_handed_over


class TimedWorker:
    """The caller controls time: `start_step` returns how long a step takes, `end_step` the step's outputs."""

    def __init__(
        self,
        name: str,
        role: WorkerRole,
        num_blocks: int,
        key: bytes,
        start_load: Callable[[str, int], None],
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_model_len=16_384,
            async_scheduling=False,
        )
        self.ref = WorkerRef(name, f"{name}-1", ("tcp://127.0.0.1:1",), BLOCK_SIZE)
        self.role = role
        self.scheduler = Scheduler(config, CountingConnector(start_load), key)
        self.requests: dict[str, TimedRequest] = {}
        self._meter = LoadMeter()
        self._plan: SchedulerOutput | None = None
        self._planned_work = 0, 0
        self._began_at = 0.0
        self._num_events = 0
        self._kv_events = self.scheduler.kv_events.full_listing()

    def add(self, sub_request: EngineRequest, answer: tuple[int, ...], now: float) -> None:
        request = Request(
            sub_request.request_id,
            sub_request.prompt_token_ids,
            sub_request.sampling_params,
            arrival_time=now,
            kv_transfer=sub_request.kv_transfer,
            output_token_ids=sub_request.output_token_ids,
            on_preemption=OnPreemption.RESUME,  # nothing moves to another worker here
        )
        self.requests[request.request_id] = TimedRequest(request, answer)
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> TimedOutputs:
        """Ends a request, if it has not ended."""
        return self._outputs(self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED))

    def start_step(self, now: float) -> float | None:
        """How long the next step takes; None if there is nothing to do."""
        if self._plan is not None or not self.scheduler.has_requests():
            return None
        plan = self.scheduler.schedule()
        if not plan.num_scheduled_tokens:
            return None
        for request_id in plan.num_scheduled_tokens:
            here = self.requests[request_id]
            here.began_at = now if here.began_at is None else here.began_at
        self._plan, self._began_at = plan, now
        num_prefill, num_decodes = self._planned_work = self._work(plan)
        return STEP_S + PREFILL_TOKEN_S * num_prefill + DECODE_REQUEST_S * num_decodes

    def end_step(self, now: float) -> TimedOutputs:
        plan, self._plan = self._plan, None
        assert plan is not None
        sampled = {}
        for request_id in plan.num_scheduled_tokens.keys() & self.requests:
            request = self.requests[request_id].request
            if request.num_computed_tokens == request.num_tokens:
                sampled[request_id] = [self.requests[request_id].answer[request.num_output_tokens]]
        self._meter.step_done(*self._planned_work, self._began_at, now)
        return self._outputs(self.scheduler.update_from_output(plan, ModelRunnerOutput(sampled)))

    def receive(self, request_id: str, num_tokens: int, moving_s: float) -> TimedOutputs:
        """Takes a prompt that has arrived from a prefill worker, and its first token."""
        here = self.requests[request_id]
        first = FirstToken(here.answer[here.request.num_output_tokens], None)
        received = ReceivedKV(request_id, first, num_tokens * BYTES_PER_TOKEN, moving_s, moving_s)
        return self._outputs(
            self.scheduler.update_connector_output(KVConnectorOutput(finished_recving=(received,)))
        )

    def release(self, request_id: str) -> None:
        self.scheduler.update_connector_output(KVConnectorOutput(finished_sending=(request_id,)))

    def take_kv_events(self) -> KVEvents | None:
        """Changes of the prefix cache since the last call, as the request plane would send them."""
        change = merge_events([*self._kv_events, *self.scheduler.kv_events.take_events()])
        self._kv_events = []
        if change is None:
            return None
        self._num_events += 1
        return KVEvents(self._num_events - 1, change.is_anew, change.removed, change.stored)

    def status(self) -> WorkerStatus:
        return WorkerStatus(
            self.ref,
            self.role,
            WorkerState.READY,
            self.scheduler.kv_block_counts(),
            self.scheduler.request_counts(),
            {},
            load=WorkerLoad(
                num_queued_prompt_tokens=self.scheduler.waiting_load().num_prompt_tokens,
                prefill_tokens_per_s=self._meter.prefill_tokens_per_s,
                decode_step_s=self._meter.decode_step_s,
            ),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        )

    def _work(self, plan: SchedulerOutput) -> tuple[int, int]:
        """Prompt tokens and decoding requests of a planned step."""
        num_prefill = num_decodes = 0
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            request = self.requests[request_id].request
            if request.num_computed_tokens - num_tokens < request.num_prompt_tokens:
                num_prefill += num_tokens
            else:
                num_decodes += 1
        return num_prefill, num_decodes

    def _outputs(self, produced: Any) -> TimedOutputs:
        outputs = []
        for output in chain.from_iterable(produced.values()):
            outputs.append((self.requests[output.request_id], output))
            if output.finish_reason is not None:
                del self.requests[output.request_id]
            assert output.finish_reason is not FinishReason.ERROR, output.error
        return outputs
