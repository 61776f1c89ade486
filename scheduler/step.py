"""StepPlan: a SchedulerOutput under construction; knows no policy and no memory."""

from collections.abc import Sequence
from itertools import compress

from baton.step import CachedRequestData, NewRequestData, SchedulerOutput
from scheduler.block_pool import Block
from scheduler.request import Request


class StepPlan:
    """Collects the requests of this step and tracks the rest of the token budget."""

    def __init__(self, number: int, token_budget: int) -> None:
        self.token_budget = token_budget
        self.requests: list[Request] = []
        """The step's requests, in the order of scheduling."""
        self.num_scheduled_tokens: dict[str, int] = {}
        self.spec_token_ids: dict[str, tuple[int, ...]] = {}
        """By request: the drafts among its scheduled tokens."""
        self.forced_token_ids: dict[str, tuple[int, ...]] = {}
        """By request: tokens that the runner appends before it computes the step."""
        self.num_reused_tokens = 0
        """Tokens of admitted requests that the step need not compute."""
        self.prompts_that_end: set[str] = set()
        """Prompts for other workers whose last token is in this step."""
        self.preempted: set[str] = set()
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self._number = number
        self._has_withdrawn = False
        self._new: list[NewRequestData] = []
        self._resumed: dict[str, int] = {}
        self._continued: list[str] = []
        self._new_block_ids: list[tuple[int, ...]] = []
        self._num_computed_tokens: list[int] = []

    def start(self, request: Request, num_tokens: int, *, is_loaded: bool = False) -> None:
        """Adds a request that is new to the runner. `is_loaded`: its computed tokens came from another worker."""
        assert request.block_table is not None
        self._new.append(
            NewRequestData(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=tuple(request.output_token_ids),
                sampling_params=request.sampling_params,
                stop_token_ids=request.stop_token_ids,
                block_ids=request.block_table.block_ids,
                num_computed_tokens=request.num_computed_tokens,
                is_loaded=is_loaded,
            )
        )
        self.num_reused_tokens += request.num_computed_tokens
        self._spend(request, num_tokens)

    def resume(self, request: Request, num_tokens: int) -> None:
        """Adds a request that the runner knows; all its blocks are new."""
        assert request.block_table is not None
        self._resumed[request.request_id] = request.num_tokens
        self.num_reused_tokens += request.num_computed_tokens
        self.proceed(request, num_tokens, request.block_table.blocks)

    def proceed(self, request: Request, num_tokens: int, new_blocks: Sequence[Block]) -> None:
        """Adds a running request."""
        self._continued.append(request.request_id)
        self._new_block_ids.append(tuple([b.block_id for b in new_blocks]) if new_blocks else ())
        self._num_computed_tokens.append(request.num_computed_tokens)
        self._spend(request, num_tokens)

    def preempt(self, request: Request) -> None:
        """Notes that the request lost its blocks. Its tokens in this step, if any, return to the budget."""
        self.preempted.add(request.request_id)
        num_tokens = self.num_scheduled_tokens.pop(request.request_id, None)
        if num_tokens is not None:
            self.token_budget += num_tokens
            self.requests.remove(request)
            self.spec_token_ids.pop(request.request_id, None)
            self.prompts_that_end.discard(request.request_id)
            self._has_withdrawn = True

    def finish(self, preempted: set[str], finished: set[str]) -> SchedulerOutput:
        """The finished plan, including requests that were preempted or ended between the steps."""
        if self._has_withdrawn:
            self._drop_withdrawn()
        return SchedulerOutput(
            scheduled_new_reqs=tuple(self._new),
            scheduled_cached_reqs=CachedRequestData(
                request_ids=tuple(self._continued),
                new_block_ids=tuple(self._new_block_ids),
                num_computed_tokens=tuple(self._num_computed_tokens),
                resumed_num_tokens=self._resumed,
            ),
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self.num_scheduled_tokens.values()),
            preempted_req_ids=frozenset(self.preempted | preempted),
            finished_req_ids=frozenset(finished),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            step=self._number,
            scheduled_spec_decode_tokens=self.spec_token_ids,
            forced_token_ids=self.forced_token_ids,
        )

    def _drop_withdrawn(self) -> None:
        """Removes requests that were scheduled and then preempted. The runner knows all of them."""
        is_kept = [request_id in self.num_scheduled_tokens for request_id in self._continued]
        self._continued = list(compress(self._continued, is_kept))
        self._new_block_ids = list(compress(self._new_block_ids, is_kept))
        self._num_computed_tokens = list(compress(self._num_computed_tokens, is_kept))

    def _spend(self, request: Request, num_tokens: int) -> None:
        assert 0 < num_tokens <= self.token_budget, f"{num_tokens} tokens of a budget of {self.token_budget}"
        self.requests.append(request)
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.token_budget -= num_tokens
        if request.is_producer and request.num_computed_tokens + num_tokens >= request.num_tokens:
            self.prompts_that_end.add(request.request_id)
