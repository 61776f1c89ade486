"""StepPlan: a SchedulerOutput while it is being made; knows no policy and no memory."""

from collections.abc import Sequence

from baton.step import CachedRequestData, NewRequestData, SchedulerOutput
from scheduler.block_pool import Block
from scheduler.request import Request


class StepPlan:
    """Collects who runs this step and what is left of the token budget."""

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self.num_scheduled_tokens: dict[str, int] = {}
        self.preempted: set[str] = set()
        self._new: list[NewRequestData] = []
        self._continued: dict[str, tuple[Request, tuple[int, ...]]] = {}
        self._resumed: set[str] = set()

    def start(self, request: Request, num_tokens: int, block_ids: tuple[int, ...]) -> None:
        """The runner meets this request for the first time."""
        self._new.append(
            NewRequestData(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=tuple(request.output_token_ids),
                sampling_params=request.sampling_params,
                stop_token_ids=request.stop_token_ids,
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
            )
        )
        self._spend(request, num_tokens)

    def resume(self, request: Request, num_tokens: int, block_ids: tuple[int, ...]) -> None:
        """The runner knows it, but its blocks are all new."""
        self._resumed.add(request.request_id)
        self._continued[request.request_id] = (request, block_ids)
        self._spend(request, num_tokens)

    def proceed(self, request: Request, num_tokens: int, new_blocks: Sequence[Block]) -> None:
        """A running request goes on."""
        block_ids = tuple([block.block_id for block in new_blocks]) if new_blocks else ()
        self._continued[request.request_id] = (request, block_ids)
        self._spend(request, num_tokens)

    def preempt(self, request: Request) -> None:
        """The request lost its blocks. If it was to run in this step, its tokens go back into the budget."""
        self.preempted.add(request.request_id)
        if self._continued.pop(request.request_id, None) is not None:
            self.token_budget += self.num_scheduled_tokens.pop(request.request_id)

    def finish(self, preempted: set[str], finished: set[str]) -> SchedulerOutput:
        """The frozen plan, with what was preempted and finished between the steps."""
        continued = self._continued.values()
        return SchedulerOutput(
            scheduled_new_reqs=tuple(self._new),
            scheduled_cached_reqs=CachedRequestData(
                request_ids=tuple(self._continued),
                resumed_request_ids=frozenset(self._resumed),
                new_block_ids=tuple([block_ids for _, block_ids in continued]),
                num_computed_tokens=tuple([request.num_computed_tokens for request, _ in continued]),
            ),
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self.num_scheduled_tokens.values()),
            preempted_req_ids=frozenset(self.preempted | preempted),
            finished_req_ids=frozenset(finished),
        )

    def _spend(self, request: Request, num_tokens: int) -> None:
        assert 0 < num_tokens <= self.token_budget, f"{num_tokens} tokens of a budget of {self.token_budget}"
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.token_budget -= num_tokens
