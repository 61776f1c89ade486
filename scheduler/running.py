"""Running: the requests that hold blocks and compute, in their order; does not know the queue."""

from collections.abc import Iterator, Sequence

from baton.config import SchedulerConfig
from scheduler.block_pool import Block
from scheduler.kv_cache import KVCache
from scheduler.order import Order
from scheduler.preemption import Preemption
from scheduler.request import Request, RequestStatus
from scheduler.speculation import Speculation
from scheduler.step import StepPlan


class Running:
    """The running requests: at most `max_num_seqs` (with `prefill_first`: at most this many in a step)."""

    def __init__(
        self,
        config: SchedulerConfig,
        order: Order,
        kv: KVCache,
        preemption: Preemption,
        speculation: Speculation,
        *,
        mixes_prompt_parts: bool,
    ) -> None:
        self._mixes_prompt_parts = mixes_prompt_parts
        self._max_num_seqs = config.max_num_seqs
        self._threshold = config.long_prefill_token_threshold
        self._order = order
        self._kv = kv
        self._preemption = preemption
        self._speculation = speculation
        self.requests: list[Request] = []

    def continue_all(self, step: StepPlan) -> None:
        """Continues all requests in order. A request that cannot proceed does not stop those behind it.

        If blocks run out, requests are preempted until there are enough, or until the request itself is
        preempted. In that case, no request behind it continues in this step, as in vLLM V1. Requests that began
        in this step are neither continued nor preempted.
        """
        victims: Iterator[Request] | None = None
        requests, scheduled, running = self._not_in(step), step.num_scheduled_tokens, RequestStatus.RUNNING
        extend_table, max_num_seqs, threshold = self._kv.extend_table, self._max_num_seqs, self._threshold
        for request in requests:
            if step.token_budget == 0 or len(scheduled) == max_num_seqs:
                break
            if request.status is not running:
                continue  # preempted in this step
            num_tokens = self.num_wanted_tokens(request, request.num_computed_tokens)
            if num_tokens > step.token_budget or num_tokens == threshold:
                num_tokens = self.num_fitting_tokens(request, num_tokens, request.num_computed_tokens, step)
            if num_tokens == 0:
                continue
            new_blocks = extend_table(request, request.num_computed_tokens + num_tokens)
            if new_blocks is None:
                victims = victims or self._order.victims(requests)
                new_blocks = self._make_room(request, num_tokens, victims, step)
                if new_blocks is None:
                    break
            step.proceed(request, num_tokens, new_blocks)
            if request.spec_token_ids:
                self._speculation.schedule(request, num_tokens, step)
        if victims is not None:
            self.drop_stopped()

    def make_room_for_next(self, step: StepPlan) -> None:
        """After `continue_all`: makes room for the next token of the first request that is not in the step.

        This is miniVLLM's rule. miniVLLM looks for the next request's block before it checks whether the step is full.
        So it preempts a request even if the step has no place for the next one.
        """
        left_out = [r for r in self._not_in(step) if self.num_wanted_tokens(r, r.num_computed_tokens)]
        for victim in self._order.victims(left_out):
            first = left_out[0]
            if self._kv.num_missing(first, first.num_computed_tokens + 1) <= self._kv.num_free:
                break
            self._preemption.preempt(victim, step)
            if victim is first:
                break
        self.drop_stopped()

    def begin(self, request: Request) -> None:
        """Adds a request at the end. A producing request is added before the unfinished producing requests that come
        later in the queue's order."""
        index = len(self.requests)
        if request.is_producer:
            while index > 0 and _is_overtaken(self.requests[index - 1], request):
                index -= 1
        self.requests.insert(index, request)

    def first_for_others(self) -> Request | None:
        """The first unfinished prompt, if all running requests are prompts for other workers; else None."""
        if not all(request.is_producer for request in self.requests):
            return None
        return next((request for request in self.requests if request.is_prefilling), None)

    def join(self, received: Sequence[Request]) -> None:
        """Adds requests whose prompts arrived from other workers, before unfinished prompts.

        An unfinished prompt could use the whole budget for many steps. An added request lacks only one token.
        """
        index = len(self.requests)
        while index > 0 and self.requests[index - 1].is_prefilling:
            index -= 1
        self.requests[index:index] = received

    def drop_stopped(self) -> None:
        """Removes finished and preempted requests; the others keep their order."""
        running = RequestStatus.RUNNING
        self.requests = [request for request in self.requests if request.status is running]

    def num_fitting_tokens(
        self, request: Request, num_wanted: int, num_computed_tokens: int, step: StepPlan
    ) -> int:
        """How many of the request's wanted tokens the step computes: all, part of a prompt, or none.

        A producer's prompt that ends in this step does not wait for part of another producer's prompt: the two do not
        share a step. With `mixes_prompt_parts`, they may share a step, since the part hardly makes the step longer.
        """
        num_tokens = min(num_wanted, step.token_budget)
        is_whole = num_computed_tokens + num_tokens >= request.num_tokens
        if self._mixes_prompt_parts or not request.is_producer or is_whole:
            return num_tokens
        return 0 if step.prompts_that_end else num_tokens

    def num_wanted_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """The number of the request's uncomputed tokens and drafts, at most `long_prefill_token_threshold` if set.

        0 if a token in flight will certainly end the request, or if a step under way may sample several of its tokens.
        """
        num_tokens = len(request.all_token_ids)
        if request.num_output_placeholders:
            num_tokens += request.num_output_placeholders
            if num_tokens >= request.max_num_tokens or request.is_unforeseeable:
                return 0
        num_wanted = num_tokens - num_computed_tokens
        if request.spec_token_ids:
            num_wanted = self._speculation.num_wanted_tokens(request, num_wanted, num_computed_tokens)
        return self._threshold if 0 < self._threshold < num_wanted else num_wanted

    def _not_in(self, step: StepPlan) -> list[Request]:
        scheduled = step.num_scheduled_tokens
        if not scheduled:
            return self.requests
        return [request for request in self.requests if request.request_id not in scheduled]

    def _make_room(
        self, request: Request, num_tokens: int, victims: Iterator[Request], step: StepPlan
    ) -> Sequence[Block] | None:
        """Preempts victims until the request's blocks can be allocated. None if the request itself was preempted."""
        for victim in victims:
            self._preemption.preempt(victim, step)
            if victim is request:
                break
            new_blocks = self._kv.extend_table(request, request.num_computed_tokens + num_tokens)
            if new_blocks is not None:
                return new_blocks
        return None


def _is_overtaken(running: Request, request: Request) -> bool:
    return running.is_producer and running.is_prefilling and request.queue_key < running.queue_key
