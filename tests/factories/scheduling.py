"""Requests, schedulers, and two fakes to drive them: a runner whose tokens are a function, a connector."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from baton.config import SchedulerConfig
from baton.kv import KVTransferParams, TransferRole, WorkerRef
from baton.request import FirstToken, RequestOutput
from baton.sampling import SamplingParams
from baton.step import (
    EngineCoreOutputs,
    FailedKV,
    KVConnectorOutput,
    ModelRunnerOutput,
    ReceivedKV,
    SchedulerOutput,
)
from scheduler import Request, Scheduler

PEER = WorkerRef("peer", "life-1", "tcp://127.0.0.1:1")
EOS = 2

_ids = count()


def make_config(**overrides: Any) -> SchedulerConfig:
    """A small engine: 16 slots, 1,024 tokens a step, 100 usable blocks of 16."""
    values: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "max_model_len": 2048,
        "num_blocks": 101,
    }
    return SchedulerConfig(**values | overrides)


def make_scheduler(connector: "FakeConnector | None" = None, /, **overrides: Any) -> Scheduler:
    return Scheduler(make_config(**overrides), connector, hash_key=b"test" * 8)


def make_request(
    num_tokens: int = 10,
    *,
    request_id: str | None = None,
    prompt: Iterable[int] | None = None,
    max_tokens: int = 16,
    priority: int = 0,
    arrival_time: float = 0.0,
    cache_salt: str | None = None,
    role: TransferRole | None = None,
    **sampling: Any,
) -> Request:
    """A request with a prompt of its own, unless one is given."""
    number = next(_ids)
    tokens = tuple(prompt) if prompt is not None else tuple(1_000 + number for _ in range(num_tokens))
    return Request(
        request_id or f"r{number}",
        tokens,
        SamplingParams(max_tokens=max_tokens, **sampling),
        arrival_time=arrival_time,
        priority=priority,
        eos_token_ids=(EOS,),
        client_id="client",
        cache_salt=cache_salt,
        kv_transfer=KVTransferParams(role, f"t{number}", 0, PEER) if role else None,
    )


def token_at(request_id: str, position: int) -> int:
    """What the fake model says: a pure function, so that every schedule must lead to the same text."""
    return 100 + hash((request_id, position)) % 50_000


class FakeRunner:
    """Samples for every request whose known tokens are all computed; keeps its own books to check the plans by."""

    def __init__(self, next_token: Callable[[str, int], int] = token_at) -> None:
        self._next_token = next_token
        self.num_known: dict[str, int] = {}
        self._num_prompt: dict[str, int] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in plan.finished_req_ids:
            self.num_known.pop(request_id, None)
        starts = dict(
            zip(
                plan.scheduled_cached_reqs.request_ids,
                plan.scheduled_cached_reqs.num_computed_tokens,
                strict=True,
            )
        )
        for new in plan.scheduled_new_reqs:
            self.num_known[new.request_id] = len(new.prompt_token_ids) + len(new.output_token_ids)
            self._num_prompt[new.request_id] = len(new.prompt_token_ids)
            starts[new.request_id] = new.num_computed_tokens
        sampled = {}
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            end = starts[request_id] + num_tokens
            assert end <= self.num_known[request_id], f"{request_id} is scheduled past its known tokens"
            if end == self.num_known[request_id]:
                position = end - self._num_prompt[request_id]
                sampled[request_id] = [self._next_token(request_id, position)]
                self.num_known[request_id] += 1
        return ModelRunnerOutput(sampled)


@dataclass
class FakeConnector:
    """Loads whatever a consumer lacks, once, and holds blocks when told to; records what the scheduler tells it."""

    holds: bool = False
    is_unknown: bool = False
    started: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    added: list[Request] = field(default_factory=list)
    news: list[KVConnectorOutput] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    num_questions: int = 0

    def request_added(self, request: Request) -> None:
        self.added.append(request)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.news.append(output)
        self.ended.update(load.request_id for load in output.finished_recving)
        self.ended.update(load.request_id for load in output.failed_recving)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.num_questions += 1
        if self.is_unknown:
            return None, False
        if request.request_id in self.started:
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[int, ...], num_external_tokens: int
    ) -> None:
        self.started[request.request_id] = (block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return None

    def request_finished(self, request: Request, block_ids: tuple[int, ...]) -> bool:
        self.finished.append(request)
        is_loading = request.request_id in self.started.keys() - self.ended
        return self.holds and bool(block_ids) and (request.is_producer or is_loading)


def received(request: Request, token_id: int = 7) -> KVConnectorOutput:
    return KVConnectorOutput(
        finished_recving=(ReceivedKV(request.request_id, FirstToken(token_id, None), 1, 0.1, 0.1),)
    )


def failed(request: Request, num_valid_blocks: int = 0, is_cancelled: bool = False) -> KVConnectorOutput:
    return KVConnectorOutput(
        failed_recving=(FailedKV(request.request_id, num_valid_blocks, "peer lost", is_cancelled),)
    )


def flatten(outputs: dict[str, EngineCoreOutputs]) -> list[RequestOutput]:
    return [output for news in outputs.values() for output in news.outputs]


def run_step(scheduler: Scheduler, runner: FakeRunner) -> tuple[SchedulerOutput, list[RequestOutput]]:
    """One step, with every invariant checked after it."""
    plan = scheduler.schedule()
    outputs = flatten(scheduler.update_from_output(plan, runner.execute(plan)))
    scheduler.check_integrity()
    return plan, outputs


def run_to_end(
    scheduler: Scheduler, runner: FakeRunner | None = None, max_steps: int = 10_000
) -> dict[str, list[int]]:
    """Steps until nobody is left; the tokens of every request that were reported meanwhile, in order."""
    runner = runner or FakeRunner()
    tokens: dict[str, list[int]] = {}
    next_positions: dict[str, int] = {}
    for _ in range(max_steps):
        if not scheduler.has_requests():
            assert_at_rest(scheduler)
            return tokens
        _, outputs = run_step(scheduler, runner)
        for output in outputs:
            expected = next_positions.setdefault(output.request_id, output.first_position)
            assert output.first_position == expected, f"{output} does not continue at {expected}"
            next_positions[output.request_id] += len(output.token_ids)
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    raise AssertionError(f"not done after {max_steps} steps: {scheduler.request_counts()}")


def assert_at_rest(scheduler: Scheduler) -> None:
    """Nobody left, so nothing may be held (behaviour 14)."""
    scheduler.check_integrity()
    counts, blocks = scheduler.request_counts(), scheduler.kv_block_counts()
    assert (counts.running, counts.waiting, counts.waiting_for_remote_kvs) == (0, 0, 0)
    assert (blocks.free, blocks.leased, blocks.quarantined) == (blocks.total, 0, 0)
