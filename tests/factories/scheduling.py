"""Requests, schedulers, and two fakes to drive them: a connector, and a runner with computed tokens."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from zlib import crc32

from baton.config import SchedulerConfig
from baton.kv import KVTransferParams, OnLoadFailure, TransferRole, WorkerRef
from baton.kv_groups import ONE_GROUP
from baton.request import FirstToken, OnPreemption, RequestOutput
from baton.sampling import SamplingParams
from baton.step import (
    ClientOutputs,
    FailedKV,
    KVConnectorOutput,
    ModelRunnerOutput,
    ReceivedKV,
    SchedulerOutput,
)
from scheduler import Request, Scheduler
from simulator.device import Computed
from tests.factories.paged_memory import PagedMemory, kv_of
from worker.device_check import CHECKING

PEER = WorkerRef("peer", "incarnation-1", ("tcp://127.0.0.1:1",), 16)
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
    """A scheduler of `make_config`. With `num_speculative_tokens`, requests may have drafts."""
    num_speculative_tokens = overrides.pop("num_speculative_tokens", 0)
    kv_groups = overrides.pop("kv_groups", ONE_GROUP)
    return Scheduler(
        make_config(**overrides),
        connector,
        hash_key=b"test" * 8,
        num_speculative_tokens=num_speculative_tokens,
        kv_groups=kv_groups,
    )


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
    on_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE,
    output_token_ids: Iterable[int] = (),
    on_preemption: OnPreemption = OnPreemption.RESUME,
    skip_reading_prefix_cache: bool = False,
    **sampling: Any,
) -> Request:
    """A request with its own prompt, unless `prompt` is given."""
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
        kv_transfer=KVTransferParams(role, f"t{number}", 0, PEER, on_failure) if role else None,
        output_token_ids=output_token_ids,
        on_preemption=on_preemption,
        skip_reading_prefix_cache=skip_reading_prefix_cache,
    )


def token_at(request_id: str, position: int) -> int:
    """The token of the fake model: a pure function, so that every schedule must lead to the same text."""
    return 100 + crc32(f"{request_id}@{position}".encode()) % 50_000


Guess = Callable[[str, int], tuple[int, ...] | None]
"""A function that gives a request's drafts from a position on. None: drafts are also unlikely for the next
positions."""


def guess_nothing(_request_id: str, _position: int) -> None:
    """Guesses no drafts."""


@dataclass(slots=True)
class KnownRequest:
    """What a runner remembers about a request between steps."""

    num_prompt_tokens: int
    block_ids: list[int]
    kv: list[int]
    """The expected content of the slots of all its tokens."""
    has_grammar: bool


class FakeRunner:
    """Samples for every request whose known tokens are all computed, and verifies drafts.

    Its drafts are announced one step in advance, or appear without an announcement.

    The runner writes into slots, and reads them back as attention would. So a test fails if a block is lost,
    shared by mistake, hit before it was filled, or reused too early.
    """

    def __init__(
        self,
        next_token: Callable[[str, int], int] = token_at,
        memory: PagedMemory | None = None,
        guess: Guess = guess_nothing,
        force: Guess = guess_nothing,
    ) -> None:
        """`force` gives the tokens that grammars force from a position on."""
        self._next_token = next_token
        self._guess = guess
        self._force = force
        self._known: dict[str, KnownRequest] = {}
        self.memory = memory or PagedMemory(16)

    def launch(self, plan: SchedulerOutput) -> Computed:
        return Computed(self.execute(plan))

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in plan.finished_req_ids:
            self._known.pop(request_id, None)
        for block_id, host_block_id in plan.swap_out:
            self.memory.copy_out(block_id, host_block_id)
        for host_block_id, block_id in plan.swap_in:
            self.memory.copy_in(host_block_id, block_id)
        starts = self._learn(plan)
        ends = {request_id: starts[request_id] + num for request_id, num in plan.num_scheduled_tokens.items()}
        drafts = {request_id: plan.scheduled_spec_decode_tokens.get(request_id, ()) for request_id in ends}
        kv = {request_id: self._kv_with(request_id, drafts[request_id]) for request_id in ends}
        for request_id, end in ends.items():
            known, start = self._known[request_id], starts[request_id]
            assert end <= len(kv[request_id]), f"{request_id} is scheduled past its known tokens"
            assert not drafts[request_id] or end == len(kv[request_id]), (
                "drafts come after the last known token"
            )
            self.memory.write(known.block_ids, kv[request_id][start:end], start)
        for request_id, end in ends.items():  # each layer writes all tokens' KV before attention reads it
            block_ids, start = self._known[request_id].block_ids, starts[request_id]
            is_own = request_id == CHECKING or self.memory.holds(block_ids, kv[request_id][:end], start)
            assert is_own, f"{request_id} reads foreign KV"
        complete = [request_id for request_id, end in ends.items() if end == len(kv[request_id])]
        sampled = {request_id: self._verified(request_id, drafts[request_id]) for request_id in complete}
        behind = {request_id: self._num_outputs(request_id) for request_id in complete}
        forced = {i: self._force(i, at) or () for i, at in behind.items() if self._known[i].has_grammar}
        guessed = {i: self._guess(i, at) for i, at in behind.items() if not forced.get(i)}
        return ModelRunnerOutput(
            sampled,
            draft_token_ids={i: drafts for i, drafts in guessed.items() if drafts},
            forced_token_ids={i: run for i, run in forced.items() if run},
            unforeseeable=forced.keys() | {i for i, drafts in guessed.items() if drafts is not None},
        )

    def _learn(self, plan: SchedulerOutput) -> dict[str, int]:
        """Learns new requests and blocks; returns where each scheduled request's step starts."""
        starts = {}
        for request_id, token_ids in plan.forced_token_ids.items():
            if known := self._known.get(request_id):
                known.kv += kv_of(token_ids, known.kv[-1])
        for new in plan.scheduled_new_reqs:
            assert new.request_id not in self._known, f"{new.request_id} is not new"
            tokens, p = new.prompt_token_ids + new.output_token_ids, new.sampling_params
            has_grammar = p.structured_output is not None and p.logprobs is None
            self._known[new.request_id] = KnownRequest(
                len(new.prompt_token_ids), list(new.block_ids), kv_of(tokens), has_grammar
            )
            starts[new.request_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        changes = zip(cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, num_computed_tokens in changes:
            known = self._known[request_id]
            if request_id in cached.resumed_num_tokens:
                known.block_ids = []
                del known.kv[cached.resumed_num_tokens[request_id] :]
            known.block_ids = [*known.block_ids, *block_ids]
            starts[request_id] = num_computed_tokens
        return starts

    def _kv_with(self, request_id: str, drafts: Sequence[int]) -> list[int]:
        kv = self._known[request_id].kv
        return kv + kv_of(drafts, kv[-1]) if drafts else kv

    def _verified(self, request_id: str, drafts: Sequence[int]) -> list[int]:
        """The drafts that are right, and the token after them."""
        token_ids = [self._sample(request_id)]
        for draft in drafts:
            if draft != token_ids[-1]:
                break
            token_ids.append(self._sample(request_id))
        return token_ids

    def _sample(self, request_id: str) -> int:
        known = self._known[request_id]
        token_id = self._next_token(request_id, self._num_outputs(request_id))
        known.kv += kv_of([token_id], known.kv[-1])
        return token_id

    def _num_outputs(self, request_id: str) -> int:
        return len(self._known[request_id].kv) - self._known[request_id].num_prompt_tokens


@dataclass
class FakeConnector:
    """Loads all tokens that a consumer lacks, at once.

    With `holds`, keeps blocks. Records the scheduler's calls.

    Until a load's end is reported, it writes nonsense into the load's blocks in every step. It also checks that leased
    blocks are unchanged. So a test notices blocks that are reused too early.
    """

    holds: bool = False
    is_unknown: bool = False
    memory: PagedMemory = field(default_factory=lambda: PagedMemory(16))
    started: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    added: list[Request] = field(default_factory=list)
    outputs: list[KVConnectorOutput] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    num_questions: int = 0
    loading: dict[str, Request] = field(default_factory=dict)
    under_way: set[str] = field(default_factory=set)
    """Loads between their command and the report of their end."""
    commanded: dict[str, Request] = field(default_factory=dict)
    """Loads that were commanded but have not started; see `starts_late`."""
    starts_late: bool = False
    """Whether loads wait for `start_load_kv`, which is called when every step planned before them is
    computed."""
    leased: dict[str, tuple[Request, tuple[int, ...]]] = field(default_factory=dict)

    def request_added(self, request: Request) -> None:
        self.added.append(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        self.num_questions += 1
        return None if self.is_unknown else request.num_initial_tokens - num_computed_tokens

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[int, ...], num_external_tokens: int
    ) -> None:
        self.started[request.request_id] = (block_ids, num_external_tokens)
        self.commanded[request.request_id] = request
        self.under_way.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        for request in self.loading.values():
            self._scribble(request)
        commanded, self.commanded = self.commanded, {}
        if not self.starts_late:
            self.start_load_kv(commanded)
        return commanded

    def start_load_kv(self, commanded: dict[str, Request]) -> None:
        """Lets these loads write and end from now on.

        A load starts only once, however often this is called.
        """
        while commanded:
            request_id, request = commanded.popitem()
            self.loading[request_id] = request
            self._scribble(request)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.outputs.append(output)
        num_valid = {load.request_id: load.num_valid_blocks for load in output.failed_recving}
        for request_id in [*num_valid, *(load.request_id for load in output.finished_recving)]:
            self.under_way.discard(request_id)
            if request := self.loading.pop(request_id, None):
                block_ids, num_external_tokens = self.started[request_id]
                num_rows = num_valid.get(request_id, len(block_ids) // self.memory.groups.num_groups)
                kv = kv_of(request.all_token_ids[: request.num_initial_tokens])[-num_external_tokens:]
                self._fill(request, kv[: num_rows * self.memory.block_size])
        for request_id in output.quiesced:
            self.loading.pop(request_id, None)
            self.under_way.discard(request_id)
        for request_id in output.finished_sending:
            if request_id in self.leased:
                request, block_ids = self.leased.pop(request_id)
                kv = kv_of(request.all_token_ids[: request.num_initial_tokens])
                assert self.memory.holds(block_ids, kv, len(kv)), (
                    f"{request_id} lost what it has to hand over"
                )

    def request_finished(self, request: Request, block_ids: tuple[int, ...]) -> bool:
        self.finished.append(request)
        if not self.holds:
            self.loading.pop(request.request_id, None)
            self.commanded.pop(request.request_id, None)
            self.under_way.discard(request.request_id)
            return False
        if request.is_handed_over:
            self.leased[request.request_id] = (request, block_ids)
        is_loading = request.request_id in self.under_way
        return is_loading or (request.is_producer and bool(block_ids))

    def _scribble(self, request: Request) -> None:
        self._fill(request, [-1] * self.started[request.request_id][1])

    def _fill(self, request: Request, kv: list[int]) -> None:
        self.memory.write(self.started[request.request_id][0], kv)


def received(request: Request, token_id: int = 7) -> KVConnectorOutput:
    return KVConnectorOutput(
        finished_recving=(ReceivedKV(request.request_id, FirstToken(token_id, None), 1, 0.1, 0.1),)
    )


def failed(request: Request, num_valid_blocks: int = 0, is_unneeded: bool = False) -> KVConnectorOutput:
    return KVConnectorOutput(
        failed_recving=(FailedKV(request.request_id, num_valid_blocks, "peer lost", is_unneeded),)
    )


def flatten(outputs: ClientOutputs) -> list[RequestOutput]:
    return [output for news in outputs.values() for output in news]


def run_step(scheduler: Scheduler, runner: FakeRunner) -> tuple[SchedulerOutput, list[RequestOutput]]:
    """Runs one step, and checks every invariant after it."""
    plan = scheduler.schedule()
    outputs = flatten(scheduler.update_from_output(plan, runner.execute(plan)))
    scheduler.check_integrity()
    return plan, outputs


def run_to_end(
    scheduler: Scheduler, runner: FakeRunner | None = None, max_steps: int = 10_000
) -> dict[str, list[int]]:
    """Steps until no request is left; returns the tokens reported for each, in order."""
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
    """Checks that no request is left, and that so no block is used (behaviour 14)."""
    scheduler.check_integrity()
    counts, blocks = scheduler.request_counts(), scheduler.kv_block_counts()
    assert (counts.running, counts.waiting, counts.waiting_for_remote_kvs) == (0, 0, 0)
    assert (blocks.free, blocks.leased, blocks.quarantined) == (blocks.total, 0, 0)
