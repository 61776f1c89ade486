"""Preemption: how a running request gives up its blocks, and what becomes of its KV; chooses no victim."""

from collections import Counter
from collections.abc import Iterable

from baton.request import OnPreemption
from scheduler.kv_cache import KVCache
from scheduler.order import Order
from scheduler.queue import WaitingQueue
from scheduler.request import Request, RequestStatus
from scheduler.step import StepPlan
from scheduler.swap import SwapSpace


class Preemption:
    """Victims keep their output tokens and return to the queue. Their KV is recomputed or copied back.

    The exception is a victim with `OnPreemption.GIVE_BACK` whose KV cannot be copied: it continues on another worker,
    and only waits for its end here.
    """

    def __init__(
        self,
        order: Order,
        waiting: WaitingQueue,
        kv: KVCache,
        swap: SwapSpace,
        counters: Counter[str],
    ) -> None:
        self._order = order
        self._waiting = waiting
        self._kv = kv
        self._swap = swap
        self._counters = counters
        self.given_back: dict[str, Request] = {}
        """Victims that will continue on other workers, and have not ended here yet."""

    def preempt(self, victim: Request, step: StepPlan) -> None:
        """While a step is planned: stops `victim`, and withdraws its part of this step."""
        step.preempt(victim)
        self._kv.withdraw_uncomputed(victim)
        if self._can_swap(victim):
            block_ids = self._kv.block_ids(victim)
            needed = [block_ids[index] for index in self._kv.needed_entries(victim)]
            copies = self._swap.swap_out(victim, needed)
            step.swap_out += copies
            self._counters["swap_preemptions"] += 1
            self._counters["swapped_out_blocks"] += len(copies)
            self._requeue(victim, victim.num_computed_tokens)
        elif victim.on_preemption is OnPreemption.GIVE_BACK:
            self._free_blocks(victim, 0)
            self.given_back[victim.request_id] = victim
        else:
            self._requeue(victim, 0)

    def preempt_all(self, running: list[Request]) -> set[str]:
        """Between steps: preempts all requests and drops their KV. Returns their ids.

        The youngest is preempted first, so that the oldest is first in the queue. No request is given back:
        this worker has room for all of them.
        """
        request_ids = {request.request_id for request in running}
        while running:
            self._requeue(running.pop(), 0)
        return request_ids

    def forget_swapped(self, requests: Iterable[Request]) -> None:
        """Discards the KV that preempted requests have in host memory."""
        for request in requests:
            if request.swapped_block_ids:
                self._swap.discard(request)
                request.num_computed_tokens = 0

    def begin_anew(self, requests: Iterable[Request]) -> set[str]:
        """Makes preempted requests count as new requests, since the runner forgets them. Returns their ids."""
        preempted = [request for request in requests if request.status is RequestStatus.PREEMPTED]
        for request in preempted:
            request.move_to(RequestStatus.WAITING)
        return {request.request_id for request in preempted}

    def _can_swap(self, victim: Request) -> bool:
        if not self._swap.num_total or len(self._kv.needed_entries(victim)) > self._swap.num_free:
            return False
        if victim.num_output_placeholders:
            has_drafts = victim.num_computed_tokens >= victim.num_tokens + victim.num_output_placeholders
            if has_drafts and self._kv.groups.num_windowed:
                return False  # if drafts are wrong, rows that left the window are needed again
            if victim.num_tokens + victim.num_output_placeholders >= victim.max_num_tokens:
                # The token in flight ends the request. A producer drops it, and must compute its last position again.
                return False
        return True

    def _requeue(self, victim: Request, num_kept_tokens: int) -> None:
        self._free_blocks(victim, num_kept_tokens)
        victim.queue_key = self._order.key_of_returning(victim)
        self._waiting.push(victim)

    def _free_blocks(self, victim: Request, num_kept_tokens: int) -> None:
        self._kv.free(victim)
        victim.num_computed_tokens = num_kept_tokens
        victim.spec_token_ids = ()
        victim.move_to(RequestStatus.PREEMPTED)
        victim.count_preemption()
        self._counters["preemptions"] += 1
