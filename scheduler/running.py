"""Running: the requests that hold blocks and compute, in their order; knows nothing about those that wait."""

from collections.abc import Sequence

from baton.config import SchedulerConfig
from scheduler.kv_cache import KVCache
from scheduler.order import Order
from scheduler.preemption import Preemption
from scheduler.request import Request
from scheduler.step import StepPlan


class Running:
    """At most `max_num_seqs` requests; those that give way leave from wherever the order says."""

    def __init__(self, config: SchedulerConfig, order: Order, kv: KVCache, preemption: Preemption) -> None:
        self._threshold = config.long_prefill_token_threshold
        self._order = order
        self._kv = kv
        self._preemption = preemption
        self.requests: list[Request] = []

    def go_on(self, step: StepPlan) -> None:
        """Everybody continues, in order; one that cannot proceed does not stop those behind it.

        Where blocks run out, requests are preempted until there are enough, or until it is the request's own turn to
        give way: then nobody behind it is served either, since all of those are worth less.
        """
        requests, index = self.requests, 0
        while index < len(requests) and step.token_budget > 0:
            request = requests[index]
            num_tokens = self.num_wanted_tokens(request, request.num_computed_tokens)
            if num_tokens > 1:
                num_tokens = min(num_tokens, step.token_budget)
            if num_tokens == 0:
                index += 1
                continue
            new_blocks = self._kv.extend_table(request, request.num_computed_tokens + num_tokens)
            while new_blocks is None:
                victim_index = self._preempt_one(step)
                if victim_index == index:
                    return
                index -= victim_index < index
                new_blocks = self._kv.extend_table(request, request.num_computed_tokens + num_tokens)
            step.proceed(request, num_tokens, new_blocks)
            index += 1

    def join(self, received: Sequence[Request]) -> None:
        """Requests whose prompts came from elsewhere stand before unfinished prompts.

        Those could take the whole budget for many steps, and these lack one token each.
        """
        index = len(self.requests)
        while index > 0 and self.requests[index - 1].is_prefilling:
            index -= 1
        self.requests[index:index] = received

    def drop_finished(self) -> None:
        self.requests = [request for request in self.requests if not request.is_finished]

    def num_wanted_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """What the request lacks, as far as one step may take it; nothing if a token under way is sure to end it."""
        num_tokens = len(request.all_token_ids)
        if request.num_output_placeholders:
            num_tokens += request.num_output_placeholders
            if num_tokens >= request.max_num_tokens:
                return 0
        num_wanted = num_tokens - num_computed_tokens
        return self._threshold if 0 < self._threshold < num_wanted else num_wanted

    def _preempt_one(self, step: StepPlan) -> int:
        """Returns where the victim stood."""
        index = self._order.victim_index(self.requests)
        self._preemption.preempt(self.requests.pop(index), step)
        return index
