"""WorkerEstimate: one worker as it probably stands: its latest report, and what this gateway has sent it since.

A worker reports twice a second, and other gateways may send it requests, so neither source is complete:

    requests, waiting prompt tokens   =  this gateway's own  +  what the report has beyond them
    free blocks                       =  as reported  -  blocks for requests that have none yet
                                         +  blocks returned by ended requests

A request has no blocks yet if it was sent after the latest report. If the report counts fewer requests with blocks
than were sent, the youngest have none. The estimate errs towards too few free blocks: a prompt counts with all its
blocks, even if it shares some, and an ended request returns no block that it may share. One of 10 blocks, 4 of which
the worker had cached when it came, returns 4 if another request found 6 blocks of a prefix there: those may be its
own.
"""

from itertools import islice

from baton.kv_groups import ONE_GROUP
from baton.worker import WorkerRole, WorkerState, WorkerStatus
from gateway.routing.placement import Placement
from gateway.routing.rates import MovingAverage, StepTime

UNKNOWN_STEP_TOKENS = 128
"""Assumed of a worker that has not said how many tokens a step of it may have."""


class WorkerEstimate:
    """The worker of one name. What decisions read are attributes, which each call updates."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sub_requests: dict[int, Placement] = {}
        """Running sub-requests, oldest first; by identity, since two placements may be equal."""
        self.is_gone = True
        """Unknown, or lost."""
        self.num_requests = 0
        """Requests on the worker, or on their way to it."""
        self.num_waiting_tokens = 0
        """Prompt tokens that the worker has yet to compute."""
        self.block_size = 1
        self._groups = ONE_GROUP
        self.room = 0
        """Free blocks, less those promised, and less one for each running request to grow."""
        self.step_tokens = UNKNOWN_STEP_TOKENS
        """The most tokens of one step."""
        self.prefill_rate = MovingAverage()
        self.decode_step = StepTime()
        self._status: WorkerStatus | None = None
        self._since_report: set[int] = set()
        """Requests sent since the latest report."""
        self._num_freed = 0
        self._num_reported = 0
        self._num_own_tokens = 0
        self._num_others = 0
        self._num_others_tokens = 0

    @property
    def status(self) -> WorkerStatus:
        assert self._status is not None, f"{self.name} has sent no status yet"
        return self._status

    @property
    def service(self) -> WorkerRole | None:
        """The kind of requests that the worker takes at present; None: none."""
        if self.is_gone or self.status.state is not WorkerState.READY:
            return None
        return self.status.role

    def on_status(self, status: WorkerStatus) -> None:
        self._status = status
        self.block_size, self._groups = status.ref.block_size, status.kv_groups
        self.step_tokens = status.max_num_batched_tokens or UNKNOWN_STEP_TOKENS
        counts = status.requests
        self._num_reported = counts.running + counts.waiting + counts.waiting_for_remote_kvs
        self.is_gone = status.state.has_ended
        self._since_report.clear()
        self._num_freed = 0
        self._num_others = max(0, self._num_reported - len(self.sub_requests))
        self._num_others_tokens = max(0, status.load.num_queued_prompt_tokens - self._num_own_tokens)
        if status.load.prefill_tokens_per_s > 0.0:
            self.prefill_rate.add(status.load.prefill_tokens_per_s)
        if status.load.decode_step_s > 0.0:
            self.decode_step.add(max(1, status.num_decoding), status.load.decode_step_s)
        self._refresh()

    def gone(self) -> None:
        self.is_gone = True

    def is_new_incarnation(self, status: WorkerStatus) -> bool:
        return self._status is not None and self._status.ref.incarnation != status.ref.incarnation

    def sent(self, placement: Placement) -> None:
        assert id(placement) not in self.sub_requests, f"{placement} was already sent to {self.name}"
        self.sub_requests[id(placement)] = placement
        self._num_own_tokens += self._tokens(placement)
        self._since_report.add(id(placement))
        self._refresh()

    def ended(self, placement: Placement, *, are_hits_known: bool) -> None:
        """`are_hits_known`: whether it is known which blocks requests share. If not, the blocks count as free only once
        the worker reports them."""
        without_blocks = set(islice(reversed(self.sub_requests), self._num_without_blocks()))
        had_blocks = placement.decode == self.name and id(placement) not in without_blocks
        del self.sub_requests[id(placement)]
        self._since_report.discard(id(placement))
        if had_blocks and are_hits_known:
            shared = max(map(self._num_hit_blocks, [placement, *self.sub_requests.values()]))
            self._num_freed += max(0, placement.num_decode_blocks - shared)
        self._num_own_tokens -= self._tokens(placement)
        self._refresh()

    def may_ever_hold(self, num_tokens: int) -> bool:
        """Whether the worker's empty pool could hold `num_tokens`."""
        total = self.status.kv_blocks.total
        num_rows = self._groups.most_rows(total, self.block_size, self.step_tokens)
        return num_rows is None or num_rows * self.block_size >= num_tokens

    def fits(self, num_tokens: int) -> bool:
        """Whether the worker has free blocks for `num_tokens`."""
        return self.room >= self.num_blocks_for(num_tokens)

    @property
    def has_none_of_ours(self) -> bool:
        return not self.sub_requests

    def num_blocks_for(self, num_tokens: int) -> int:
        """Those that left a window are not counted."""
        return self._groups.num_held_blocks(num_tokens, self.block_size)

    @property
    def room_tokens(self) -> int:
        """At least so many tokens have room."""
        return self.room * self.block_size // self._groups.num_groups

    def num_tokens_in_order(self, num_tokens: int) -> int:
        """The sum, over the prompts that wait here, of their tokens or `num_tokens`, whichever are fewer. Of other
        gateways' prompts only the number and all their tokens are known: at most so many."""
        own = sum(min(num_tokens, self._tokens(each)) for each in self.sub_requests.values())
        others = min(self._num_others_tokens, num_tokens * self._num_others)
        return min(self.num_waiting_tokens, own + others)

    def _refresh(self) -> None:
        if self._status is None:
            return  # requests of a former incarnation
        self.num_requests = len(self.sub_requests) + self._num_others
        self.num_waiting_tokens = self._num_waiting_tokens()
        spoken_for = sum(
            sub_request.num_decode_blocks for sub_request in self._youngest(self._num_without_blocks())
        )
        growth = self.num_requests * self._groups.num_groups
        self.room = self._status.kv_blocks.free - spoken_for + self._num_freed - growth

    def _num_without_blocks(self) -> int:
        if self._status is None:
            return len(self.sub_requests)
        counts = self._status.requests
        return max(
            len(self._since_report), len(self.sub_requests) - counts.running - counts.waiting_for_remote_kvs
        )

    def _num_hit_blocks(self, sub_request: Placement) -> int:
        """Blocks of a prompt that this worker had cached, as far as known."""
        lacking = (
            sub_request.num_prefill_tokens if sub_request.prefill is None else sub_request.num_transfer_tokens
        )
        return sub_request.num_decode_blocks - self.num_blocks_for(lacking)

    def _num_waiting_tokens(self) -> int:
        """The lower of two bounds, each of which may be far too high: all running prompts, some of which are partly
        computed; and the latest report, part of which is computed by now, plus what was sent since."""
        reported = self.status.load.num_queued_prompt_tokens
        num_unseen = max(len(self._since_report), len(self.sub_requests) - self._num_reported)
        reported += sum(self._tokens(sub_request) for sub_request in self._youngest(num_unseen))
        return min(reported, self._num_own_tokens + self._num_others_tokens)

    def _tokens(self, sub_request: Placement) -> int:
        is_computed_here = sub_request.prefill == self.name or sub_request.prefill is None
        return sub_request.num_prefill_tokens if is_computed_here else 0

    def _youngest(self, num_sub_requests: int) -> list[Placement]:
        return list(islice(reversed(self.sub_requests.values()), num_sub_requests))
