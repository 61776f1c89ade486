"""Admission: how waiting requests get blocks and start to run or to load; knows no running order.

Two queues share one order. One has the requests that this device computes. The other has the requests whose
prompt another worker sends. The first request without room ends admission for all requests behind it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum, auto
from itertools import islice

from baton.config import SchedulerConfig
from baton.sampling import StructuredOutput
from scheduler.block_pool import Block
from scheduler.kv_cache import KVCache
from scheduler.order import Order
from scheduler.queue import WaitingQueue
from scheduler.remote import RemotePrompts
from scheduler.request import QueueKey, Request, RequestStatus
from scheduler.running import Running
from scheduler.step import StepPlan
from scheduler.swap import SwapSpace
from scheduler.trial import Trial

Fit = Callable[[Request, int, StepPlan], int]
"""Gets a waiting request, the number of its computed tokens, and the step. Returns how many more tokens of the request
fit into the step; 0: none."""


class AdmissionOutcome(Enum):
    """What became of a waiting request in one step."""

    DONE = auto()
    """The request left its queue: it runs, or its load has begun."""
    NOT_YET = auto()
    """The request's last token is still in flight, or a current trial excludes it. Requests behind it may overtake
    it."""
    UNKNOWN = auto()
    """The connector cannot tell yet whether the prompt can be loaded. Requests behind this one may overtake it."""
    NO_ROOM = auto()
    """The request does not fit. No request behind it may overtake it."""


class Admission:
    """Moves requests out of the queues while budget, slots and blocks last."""

    def __init__(
        self,
        config: SchedulerConfig,
        order: Order,
        waiting: WaitingQueue,
        running: Running,
        kv: KVCache,
        remote: RemotePrompts,
        swap: SwapSpace,
        counters: Counter[str],
        trial: Trial,
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._counts_by_step = config.batching == "prefill_first"
        self._order = order
        self._waiting = waiting
        self._to_load = WaitingQueue()
        self._compiling: dict[str, Request] = {}
        self._unknown: dict[str, Request] = {}
        """Requests, oldest first, for which the connector could not tell yet whether the prompt can be loaded."""
        self._num_reserved: int | None = None
        """The result of `_num_reserved_blocks`; None until this step's admission needs it."""
        self._running = running
        self._kv = kv
        self._remote = remote
        self._swap = swap
        self._counters = counters
        self._trial = trial

    @property
    def num_waiting(self) -> int:
        """Number of queued requests; these have no blocks."""
        return len(self._waiting) + len(self._to_load) + len(self._compiling) + len(self._unknown)

    def add(self, request: Request) -> None:
        """Queues a new request at the place that the order gives it.

        While its grammar compiles, the request is in no queue, but has its key already.
        """
        hits = self._kv.find_cached_prefix(request) if request.is_producer else ()
        request.queue_key = self._order.key_of_new(request, self._kv.num_tokens_in(hits))
        if request.status is RequestStatus.WAITING_FOR_FSM:
            self._compiling[request.request_id] = request
        else:
            self.push(request)

    def wanted_grammars(self) -> frozenset[StructuredOutput]:
        """The grammars that requests wait for."""
        outputs = (request.sampling_params.structured_output for request in self._compiling.values())
        return frozenset(output for output in outputs if output is not None)

    def take_compiled(self, output: StructuredOutput) -> list[Request]:
        """Removes and returns all requests that wait for this grammar."""
        waiting = self._compiling.values()
        ready = [request for request in waiting if request.sampling_params.structured_output == output]
        for request in ready:
            del self._compiling[request.request_id]
        return ready

    def push(self, request: Request) -> None:
        """Puts a request into its queue, at the place that its key gives."""
        (self._to_load if request.may_load else self._waiting).push(request)

    def add_returning(self, request: Request) -> None:
        """Queues a request whose prompt did not arrive, so that this device computes the prompt.

        The request had its turn before, so it does not queue behind new requests (`key_of_returning`).
        """
        request.queue_key = self._order.key_of_returning(request)
        self._waiting.push(request)

    def ask_again(self, request_ids: Iterable[str]) -> None:
        """Makes the next step ask the connector again about these requests: its answers may have changed."""
        for request_id in request_ids:
            request = self._unknown.pop(request_id, None)
            if request is not None:
                self._to_load.push(request)

    def remove(self, request: Request) -> None:
        """Removes a request from the queue in which it waits, if any."""
        if not (self._waiting.remove(request) or self._to_load.remove(request)):
            self._compiling.pop(request.request_id, None)
            self._unknown.pop(request.request_id, None)

    def first_ids(self, limit: int) -> tuple[str, ...]:
        """Ids of some waiting requests, for people to read."""
        received = self._remote.received.first_ids(limit)
        queued = self._waiting.first_ids(limit) + self._to_load.first_ids(limit)
        return (received + queued + tuple(islice(self._unknown, limit)))[:limit]

    def admit_received(self, step: StepPlan) -> list[Request]:
        """Gives free slots to requests whose prompt has arrived. These requests have their blocks already."""
        received: list[Request] = []
        if self._trial.group is not None:
            return received
        num_slots = self._max_num_seqs - len(self._running.requests)
        while self._remote.received and len(received) < num_slots and step.token_budget > 0:
            request = self._remote.received.pop()
            assert request.num_tokens == request.num_computed_tokens + 1, "a received request lacks one token"
            granted = self._kv.extend_table(request, request.num_tokens)
            assert granted == (), "a load reserves the block of the first new token"
            step.start(request, 1, is_loaded=True)
            request.move_to(RequestStatus.RUNNING)
            received.append(request)
        return received

    def admit_waiting(self, step: StepPlan, fit: Fit, before: QueueKey | None = None) -> None:
        """Admits as many requests as fit, in order. Skips requests that are not ready; they keep their place.

        `before`: admits only requests with a lower key, and only if enough blocks remain for all running
        prompts. So no running request has to be preempted.
        """
        self._num_reserved, group = None, self._trial.group
        for request_id in list(islice(self._unknown, self._max_num_seqs)):  # bounded, even if many wait
            self._to_load.push(self._unknown.pop(request_id))
        passed_over: list[tuple[WaitingQueue, Request]] = []
        while self._has_place(step):
            queue = self._next_queue(may_load=self._num_promised_slots() < self._max_num_seqs)
            request = queue.peek()
            if request is None:
                break
            if before is not None and not (request.queue_key < before and self._has_room_beside(request)):
                break
            if group is not None and request.request_id not in group:
                outcome = AdmissionOutcome.NOT_YET
            elif queue is self._waiting:
                outcome = self._admit(request, step, fit)
            else:
                outcome = self._load(request)
            if outcome is AdmissionOutcome.NO_ROOM:
                break
            queue.pop()
            if outcome is AdmissionOutcome.NOT_YET:
                passed_over.append((queue, request))
            elif outcome is AdmissionOutcome.UNKNOWN:
                self._unknown[request.request_id] = request
        for queue, request in passed_over:
            queue.push(request)

    def _has_place(self, step: StepPlan) -> bool:
        """Whether another request may be admitted. Usually, it may if fewer than `max_num_seqs` requests run.

        With `prefill_first`, a place belongs to a step, so more requests may run than one step computes. But
        while requests with remote prompts wait, all running requests count, so that remote prompts find a
        place, too.
        """
        if self._counts_by_step and not (self._to_load or self._remote.received):
            return len(step.num_scheduled_tokens) < self._max_num_seqs
        return len(self._running.requests) + len(self._remote.received) < self._max_num_seqs

    def _next_queue(self, *, may_load: bool) -> WaitingQueue:
        """The queue of the first request overall.

        Without `may_load`, requests that would load are ignored: all slots are promised already.
        """
        local, remote = self._waiting.peek(), self._to_load.peek() if may_load else None
        if remote is None or (local is not None and local.queue_key < remote.queue_key):
            return self._waiting
        return self._to_load

    def _num_promised_slots(self) -> int:
        """Number of requests that have a slot, or will take one as soon as their load ends."""
        return len(self._running.requests) + len(self._remote.loading) + len(self._remote.received)

    def _load(self, request: Request) -> AdmissionOutcome:
        """Starts the load of a request, if enough blocks are free. The load uses no budget, and no slot yet."""
        if not self._kv.num_free:
            return AdmissionOutcome.NO_ROOM  # at least one block must be new
        hits = self._kv.find_cached_prefix(request, num_loaded=request.num_initial_tokens)
        num_remote = self._remote.num_tokens_to_load(request, self._kv.num_tokens_in(hits))
        if num_remote is None:
            return AdmissionOutcome.UNKNOWN
        if not self._remote.start_load(request, hits, num_remote, self._num_reserved_blocks()):
            return AdmissionOutcome.NO_ROOM
        self._count_hits(request, hits)
        return AdmissionOutcome.DONE

    def _num_reserved_blocks(self) -> int:
        """Number of blocks that unfinished running prompts still need. A load must leave this many blocks free.

        Otherwise two loads, or a load and a prefill, could each hold blocks that the other waits for.
        """
        if self._num_reserved is None:
            self._num_reserved = sum(map(self._num_still_needed, self._running.requests))
        return self._num_reserved

    def _has_room_beside(self, request: Request) -> bool:
        """Whether the free blocks suffice for the whole request, and for all running prompts."""
        return self._kv.num_blocks_for(request.num_tokens) + self._num_reserved_blocks() <= self._kv.num_free

    def _num_still_needed(self, running: Request) -> int:
        return self._kv.num_missing(running, running.num_tokens) if running.is_prefilling else 0

    def _admit(self, request: Request, step: StepPlan, fit: Fit) -> AdmissionOutcome:
        if request.num_output_placeholders:
            return AdmissionOutcome.NOT_YET  # preempted in mid-step: its token is still in flight
        if not self._kv.num_free:
            return AdmissionOutcome.NO_ROOM  # at least one block must be new
        hits = self._kv.find_cached_prefix(request)
        num_computed_tokens = self._num_computed(request, hits)
        num_tokens = fit(request, num_computed_tokens, step)
        if num_tokens == 0:
            return AdmissionOutcome.NO_ROOM
        num_in_all = num_computed_tokens + num_tokens
        if not self._kv.open_table(request, num_in_all, hits, num_ready=num_computed_tokens):
            return AdmissionOutcome.NO_ROOM
        self._count_hits(request, hits)
        self._swap_in(request, len(hits), step)
        request.num_computed_tokens = num_computed_tokens
        self._running.begin(request)
        if self._num_reserved is not None:
            self._num_reserved += self._num_still_needed(request)
        if request.status is RequestStatus.PREEMPTED:
            step.resume(request, num_tokens)
        else:
            step.start(request, num_tokens)
        request.move_to(RequestStatus.RUNNING)
        return AdmissionOutcome.DONE

    def _num_computed(self, request: Request, hits: list[Block]) -> int:
        """Number of tokens whose KV is in the prefix cache or in host memory, whichever has more of them."""
        num_hit_tokens = self._kv.num_tokens_in(hits)
        if not request.swapped_block_ids or num_hit_tokens >= request.num_computed_tokens:
            return num_hit_tokens
        return request.num_computed_tokens

    def _swap_in(self, request: Request, num_hit_blocks: int, step: StepPlan) -> None:
        """Copies back from host memory the blocks that the prefix cache no longer has."""
        if request.swapped_block_ids:
            block_ids, swapped = self._kv.block_ids(request), self._kv.needed_entries(request)
            num_here = bisect_left(swapped, num_hit_blocks)
            copies = self._swap.swap_in(request, [block_ids[index] for index in swapped], num_here)
            step.swap_in += copies
            self._counters["swapped_in_blocks"] += len(copies)

    def _count_hits(self, request: Request, hits: list[Block]) -> None:
        """Counts the hits of a request at its first admission, as V1 does.

        Later, the request may hit blocks that were computed or received for the request itself.
        """
        if request.was_admitted:
            return
        request.was_admitted, num_hit_tokens = True, self._kv.num_tokens_in(hits)
        request.num_cached_tokens = min(num_hit_tokens, request.num_prompt_tokens)
        if self._kv.may_hit(request):
            self._counters["prefix_cache_queries"] += request.num_tokens
            self._counters["prefix_cache_hits"] += num_hit_tokens
