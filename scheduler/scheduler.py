"""Scheduler: each step, who computes how many tokens in which blocks; knows no device and no time.

There is no prefill phase and no decode phase. Every request has `num_computed_tokens`, which chases its `num_tokens`; a
step hands out a budget of tokens, first to the running requests in order, then to received and waiting ones.
"""

import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum, auto

from baton.config import SchedulerConfig
from baton.errors import InvalidRequest
from baton.request import RequestOutput, TokenLogprobs
from baton.step import EngineCoreOutputs, KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from baton.worker import KVBlockCounts, RequestCounts
from scheduler.connector import KVConnector
from scheduler.kv_cache import KVCache
from scheduler.limits import ContextLimits
from scheduler.outputs import OutputsByClient
from scheduler.queue import make_queue
from scheduler.remote import RemotePrompts
from scheduler.request import Request, RequestStatus
from scheduler.step import StepPlan
from scheduler.stop import check_stop


class Admission(Enum):
    """What became of a waiting request in one step."""

    DONE = auto()
    NOT_YET = auto()
    """Not its turn for a reason of its own: it keeps its place and blocks nobody."""
    NO_ROOM = auto()
    """Nobody behind it may overtake it."""


class Scheduler:
    """The V1 loop over one device's requests and blocks.

    `config.num_blocks` and `config.max_model_len` must be set. `hash_key` (16 to 64 bytes) makes block hashes
    comparable between processes that share it; by default it is random.
    """

    def __init__(
        self, config: SchedulerConfig, connector: KVConnector | None = None, hash_key: bytes | None = None
    ) -> None:
        self._config = config
        self._limits = ContextLimits(config)
        self._connector = connector
        assert config.num_blocks is not None, "ContextLimits refuses such a config"
        self._kv = KVCache(
            config.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            hash_key if hash_key is not None else secrets.token_bytes(32),
        )
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._has_ended_running = False
        self._waiting = make_queue(config.policy)
        self._counters: Counter[str] = Counter()
        self._remote = RemotePrompts(config, connector, self._kv, self._counters)
        self._preempted_between_steps: set[str] = set()
        self._finished_between_steps: set[str] = set()

    def add_request(self, request: Request) -> None:
        """Queues a request; InvalidRequest if this engine could never run it."""
        self._limits.check(request)
        if request.request_id in self._requests or self._kv.is_held(request.request_id):
            raise InvalidRequest("request_id", f"{request.request_id!r} is in use")
        self._kv.tokens_arrived(request)
        self._requests[request.request_id] = request
        self._remote.announce(request)
        self._waiting.add(request)

    def schedule(self) -> SchedulerOutput:
        """The next step. May be empty; what it orders counts as computed from now on."""
        step = StepPlan(self._config.max_num_batched_tokens)
        received = self._schedule_received(step)
        self._schedule_running(step)
        self._join_running(received)
        if not step.preempted:
            self._admit_waiting(step)
        plan = step.finish(self._preempted_between_steps, self._finished_between_steps)
        self._preempted_between_steps, self._finished_between_steps = set(), set()
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self._requests[request_id].num_computed_tokens += num_tokens
        if self._connector is None:
            return plan
        return replace(plan, kv_connector_metadata=self._connector.build_connector_meta(plan))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[str, EngineCoreOutputs]:
        """Takes in what a step sampled; returns the news by client, finished requests included."""
        outputs = OutputsByClient()
        sampled, logprobs = model_runner_output.sampled_token_ids, model_runner_output.logprobs
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self._requests.get(request_id)
            token_ids = sampled.get(request_id)
            if request is None or not token_ids:
                continue  # it ended meanwhile, or its known tokens are not all computed yet
            if request.status is RequestStatus.PREEMPTED and request.is_producer:
                continue  # it cannot hand over blocks that it lost; it will sample the same token again
            self._take_tokens(request, token_ids, logprobs.get(request_id), outputs)
        self._drop_finished_from_running()
        return outputs.by_client()

    def update_connector_output(self, output: KVConnectorOutput) -> dict[str, EngineCoreOutputs]:
        """Takes in what transfers brought, before `schedule()`. Late, repeated and unknown news is only counted."""
        outputs = OutputsByClient()
        if self._connector is not None:
            self._connector.update_connector_output(output)
        for received in output.finished_recving:
            if request := self._remote.receive(received):
                first = received.first_token
                logprobs = [first.logprobs] if first.logprobs else None
                self._take_tokens(request, [first.token_id], logprobs, outputs)
        for failure in output.failed_recving:
            if request := self._remote.fail(failure):
                if failure.is_cancelled:
                    self._end(request, RequestStatus.FINISHED_ABORTED, outputs, failure.reason)
                elif self._config.load_failure_policy == "fail":
                    self._end(request, RequestStatus.FINISHED_ERROR, outputs, failure.reason)
                else:
                    self._waiting.prepend(request)
        self._remote.end_holds([*output.finished_sending, *output.quiesced])
        return outputs.by_client()

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus, error: str | None = None
    ) -> dict[str, EngineCoreOutputs]:
        """Ends requests in whatever state they are. Unknown and finished ones are ignored, so it may be repeated."""
        outputs = OutputsByClient()
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            self._unqueue(request)
            self._end(request, status, outputs, error)
        self._drop_finished_from_running()
        return outputs.by_client()

    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Every unfinished request."""
        return tuple(self._requests)

    def reset_prefix_cache(self, force: bool = False) -> bool:
        """Forgets every cached prefix. Refuses (False) while blocks are in use; `force` preempts what runs first."""
        if not force and self._kv.num_free != self._kv.num_usable:
            return False
        while self._running:
            victim = self._running.pop()
            self._give_up_blocks(victim)
            self._preempted_between_steps.add(victim.request_id)
        self._kv.forget_prefixes()
        return True

    def kv_block_counts(self) -> KVBlockCounts:
        return self._kv.counts()

    def request_counts(self) -> RequestCounts:
        return RequestCounts(
            running=len(self._running),
            waiting=len(self._waiting) + self._remote.num_received,
            waiting_for_remote_kvs=self._remote.num_loading,
        )

    def counters(self) -> dict[str, int]:
        """Monotonic counts since the start."""
        return dict(self._counters)

    def check_integrity(self) -> None:
        """Asserts that queues, requests and blocks tell the same story; cheap enough for an idle moment."""
        self._kv.check_integrity()
        counts = self.request_counts()
        num_known = counts.running + counts.waiting + counts.waiting_for_remote_kvs
        assert num_known == len(self._requests), f"{counts} but {len(self._requests)} requests are known"
        num_holders = counts.running + counts.waiting_for_remote_kvs + self._remote.num_received
        assert self._kv.num_tables == num_holders, "a waiting request holds blocks, or a running one none"
        assert all(request.status is RequestStatus.RUNNING for request in self._running)
        assert len(self._running) <= self._config.max_num_seqs

    # schedule(), in its own order

    def _schedule_running(self, step: StepPlan) -> None:
        """Running requests go on, in order; one that cannot proceed does not stop those behind it."""
        index = 0
        while index < len(self._running) and step.token_budget > 0:
            request = self._running[index]
            num_computed_tokens = request.num_computed_tokens
            num_tokens = self._num_wanted_tokens(request, num_computed_tokens)
            if num_tokens > 1:
                num_tokens = min(num_tokens, step.token_budget)
            if num_tokens == 0:
                index += 1
                continue
            new_blocks = self._kv.allocate_slots(request, num_computed_tokens + num_tokens)
            while new_blocks is None:
                victim_index = self._preempt_one(step)
                if victim_index == index:
                    return  # the request itself was the last to give way
                index -= victim_index < index
                new_blocks = self._kv.allocate_slots(request, num_computed_tokens + num_tokens)
            step.proceed(request, num_tokens, new_blocks)
            index += 1

    def _schedule_received(self, step: StepPlan) -> list[Request]:
        """Requests whose prompt arrived from elsewhere go first while slots last: they hold their blocks already."""
        received: list[Request] = []
        num_slots = self._config.max_num_seqs - len(self._running)
        while len(received) < num_slots and step.token_budget > 0:
            request = self._remote.pop_received()
            if request is None:
                break
            assert request.num_tokens == request.num_computed_tokens + 1, "a received request lacks one token"
            granted = self._kv.allocate_slots(request, request.num_tokens)
            assert granted == [], "a load reserves the block of token 0"
            self._announce(request, 1, step)
            received.append(request)
        return received

    def _join_running(self, received: list[Request]) -> None:
        """Received requests stand before unfinished prompts, which could take the whole budget for many steps."""
        index = len(self._running)
        while index > 0 and self._running[index - 1].is_prefilling:
            index -= 1
        self._running[index:index] = received

    def _admit_waiting(self, step: StepPlan) -> None:
        """Waiting requests join while budget, slots and blocks last; the first that does not fit ends admission."""
        skipped: list[Request] = []
        while self._waiting and len(self._running) + self._remote.num_received < self._config.max_num_seqs:
            request = self._waiting.peek()
            outcome = self._load(request, step) if request.may_load else self._admit(request, step)
            if outcome is Admission.NO_ROOM:
                break
            self._waiting.pop()
            if outcome is Admission.NOT_YET:
                skipped.append(request)
        for request in reversed(skipped):
            self._waiting.prepend(request)

    def _load(self, request: Request, step: StepPlan) -> Admission:
        """Starts a load, which takes neither budget nor slot, unless as many requests are ahead as there are slots."""
        num_ahead = len(self._running) + self._remote.num_loading + self._remote.num_received
        if num_ahead >= self._config.max_num_seqs:
            return Admission.NOT_YET
        hits = self._kv.find_cached_prefix(request)
        num_remote, is_async = self._remote.num_tokens_to_load(request, len(hits))
        if num_remote is None:
            return Admission.NOT_YET
        if not is_async:
            return self._admit(request, step)
        has_room = self._remote.start_load(request, hits, num_remote, self._running)
        return Admission.DONE if has_room else Admission.NO_ROOM

    def _admit(self, request: Request, step: StepPlan) -> Admission:
        if step.token_budget == 0:
            return Admission.NO_ROOM
        hits = self._kv.find_cached_prefix(request)
        num_hit_tokens = len(hits) * self._kv.block_size
        num_tokens = self._num_wanted_tokens(request, num_hit_tokens)
        if num_tokens > step.token_budget:
            if not self._config.enable_chunked_prefill:
                return Admission.NO_ROOM
            num_tokens = step.token_budget
        if self._kv.allocate_slots(request, num_hit_tokens + num_tokens, hits) is None:
            return Admission.NO_ROOM
        self._counters["prefix_cache_queries"] += request.num_tokens
        self._counters["prefix_cache_hits"] += num_hit_tokens
        request.num_computed_tokens = num_hit_tokens
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = min(num_hit_tokens, request.num_prompt_tokens)
        self._announce(request, num_tokens, step)
        self._running.append(request)
        return Admission.DONE

    def _announce(self, request: Request, num_tokens: int, step: StepPlan) -> None:
        announce = step.resume if request.status is RequestStatus.PREEMPTED else step.start
        announce(request, num_tokens, self._kv.block_ids(request))
        request.move_to(RequestStatus.RUNNING)

    def _num_wanted_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """What the request lacks, as far as one step may take it."""
        num_tokens = request.num_tokens - num_computed_tokens
        threshold = self._config.long_prefill_token_threshold
        return threshold if 0 < threshold < num_tokens else num_tokens

    def _preempt_one(self, step: StepPlan) -> int:
        """Takes the blocks of the youngest running request, or of the worst by priority; returns where it stood."""
        if self._config.policy == "priority":
            indices = range(len(self._running))
            index = max(indices, key=lambda i: (self._running[i].priority, self._running[i].arrival_time))
        else:
            index = len(self._running) - 1
        victim = self._running.pop(index)
        step.preempt(victim)
        self._kv.withdraw_uncomputed(victim)
        self._give_up_blocks(victim)
        return index

    def _give_up_blocks(self, victim: Request) -> None:
        """The victim starts over, keeping its outputs, as the first of those that wait."""
        self._kv.free(victim)
        victim.move_to(RequestStatus.PREEMPTED)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self._counters["preemptions"] += 1
        self._waiting.prepend(victim)

    # update_from_output()

    def _take_tokens(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        outputs: OutputsByClient,
    ) -> None:
        """Appends new tokens up to the first that ends the request, and reports them at their position."""
        first_position = request.num_output_tokens
        status, num_taken = None, 0
        for token_id in token_ids:
            request.all_token_ids.append(token_id)
            num_taken += 1
            status = check_stop(request, self._limits.max_model_len)
            if status is not None:
                break
        self._kv.tokens_arrived(request)
        output = RequestOutput(
            request_id=request.request_id,
            first_position=first_position,
            token_ids=tuple(token_ids[:num_taken]),
            logprobs=tuple(logprobs[:num_taken]) if logprobs else None,
            num_cached_tokens=request.num_cached_tokens,
        )
        if status is None:
            outputs.add(request, output)
        else:
            self._finish_with(request, status, output, outputs)

    def _finish_with(
        self, request: Request, status: RequestStatus, output: RequestOutput, outputs: OutputsByClient
    ) -> None:
        self._unqueue(request)
        if status is RequestStatus.FINISHED_HANDED_OVER:
            self._remote.hand_over(request, output)
        self._release(request, status)
        outputs.add_last(request, output)

    def _end(
        self, request: Request, status: RequestStatus, outputs: OutputsByClient, error: str | None = None
    ) -> None:
        """Ends a request without a new token; it stands in no queue any more, except that it may be running."""
        self._release(request, status)
        output = RequestOutput(
            request_id=request.request_id, first_position=request.num_output_tokens, error=error
        )
        outputs.add_last(request, output)

    def _release(self, request: Request, status: RequestStatus) -> None:
        """The one place where requests end: blocks are freed, or held while a transfer may still touch them."""
        self._has_ended_running |= request.status is RequestStatus.RUNNING
        request.move_to(status)
        self._remote.release(request)
        del self._requests[request.request_id]
        self._finished_between_steps.add(request.request_id)

    def _unqueue(self, request: Request) -> None:
        """Takes a request out of the queue it waits in, if it does."""
        is_queued = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if is_queued and not self._remote.withdraw_received(request):
            self._waiting.remove(request)

    def _drop_finished_from_running(self) -> None:
        if self._has_ended_running:
            self._running = [request for request in self._running if not request.is_finished]
            self._has_ended_running = False
