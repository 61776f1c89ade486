"""WorkerEstimate: the probable load of one worker, from its latest report and this gateway's requests.

A worker reports twice a second, and other gateways may also send it requests. So neither source is complete:

    requests, waiting prompt tokens   =  this gateway's own  +  what the report contains beyond them
    free blocks                       =  as reported  -  blocks that requests without blocks will need
                                         +  blocks returned by ended requests

A request has no blocks yet if it was sent after the latest report. If the report counts fewer requests with
blocks than were sent, the youngest requests have no blocks.

The estimate of free blocks is too low rather than too high. A prompt counts with all its blocks, even if it
shares some of them. An ended request returns no block that it may share. For example, a request has 10
blocks, of which the worker had cached 4 when the request arrived. Another request found a cached prefix of 6
blocks on this worker. These 6 blocks may be blocks of the first request, so the first request returns only 4
blocks when it ends.
"""

import math
from itertools import islice

from baton.kv_groups import ONE_GROUP
from baton.worker import WorkerRole, WorkerState, WorkerStatus
from gateway.routing.placement import Placement
from gateway.routing.rates import MovingAverage, StepTime

UNKNOWN_STEP_TOKENS = 128
"""The assumed number of tokens in a step of a worker that has not reported how many its steps may have."""

FEWEST_AHEAD = 2
SLOTS_PER_AHEAD = 4
"""A worker gets more requests than it has slots: one more for every four slots, and at least two more. Prefill workers
compute the prompts of the additional requests before a slot is free. With many more of these requests, answers would
stall after token 0 until a slot is free."""


class WorkerEstimate:
    """The estimate for the worker of one name. Each call updates the attributes that decisions read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sub_requests: dict[int, Placement] = {}
        """Running sub-requests, oldest first. The key is the placement's `id()`, since two placements may be equal."""
        self.is_gone = True
        """The worker has not reported yet, has ended, or is lost."""
        self.num_requests = 0
        """Number of requests on the worker, or on their way to it."""
        self.num_here = 0
        """How many of the `num_requests` requests do not wait for their prompt's KV from a prefill worker."""
        self.num_waiting_tokens = 0
        """Prompt tokens that the worker has not computed yet."""
        self._most_requests: float = 0
        """How many requests the worker may have at once."""
        self.block_size = 1
        self._groups = ONE_GROUP
        self._most_tokens: float = 0
        """The most tokens that the worker's empty pool could hold for one request."""
        self.room = 0
        """Free blocks, minus the blocks that requests without blocks will need, and minus one block per KV group for
        the growth of each request."""
        self.step_tokens = UNKNOWN_STEP_TOKENS
        """The largest number of tokens in one step."""
        self.prefill_rate = MovingAverage()
        self.decode_step = StepTime()
        self._status: WorkerStatus | None = None
        self._hit_blocks: dict[int, int] = {}
        """How many blocks of each running sub-request this worker had cached, as far as the router knows."""
        self._since_report: set[int] = set()
        """The requests that were sent since the latest report, by the placement's `id()`."""
        self._num_loads_since_report = 0
        """How many of the requests sent since the latest report wait for their prompt's KV from a prefill worker."""
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
        """The role whose requests the worker accepts at present; None if it accepts no requests."""
        if self.is_gone or self.status.state is not WorkerState.READY:
            return None
        return self.status.role

    def on_status(self, status: WorkerStatus) -> None:
        self._status = status
        self.block_size, self._groups = status.ref.block_size, status.kv_groups
        self.step_tokens = status.max_num_batched_tokens or UNKNOWN_STEP_TOKENS
        ahead = max(FEWEST_AHEAD, status.max_num_seqs // SLOTS_PER_AHEAD)
        self._most_requests = status.max_num_seqs + ahead if status.max_num_seqs else math.inf
        num_rows = self._groups.most_rows(status.kv_blocks.total, self.block_size, self.step_tokens)
        self._most_tokens = math.inf if num_rows is None else num_rows * self.block_size
        self._num_reported = status.requests.total
        self.is_gone = status.state.has_ended
        self._since_report.clear()
        self._num_loads_since_report = 0
        self._num_freed = 0
        self._num_others = max(0, self._num_reported - len(self.sub_requests))
        self._num_others_tokens = max(0, status.load.num_queued_prompt_tokens - self._num_own_tokens)
        if status.load.prefill_tokens_per_s > 0.0:
            self.prefill_rate.add(status.load.prefill_tokens_per_s)
        if status.load.decode_step_s > 0.0:
            self.decode_step.add(max(1, status.num_decoding), status.load.decode_step_s)
        else:
            self.decode_step = StepTime()
        self._refresh()

    def is_new_incarnation(self, status: WorkerStatus) -> bool:
        return self._status is not None and self._status.ref.incarnation != status.ref.incarnation

    def sent(self, placement: Placement) -> None:
        assert id(placement) not in self.sub_requests, f"{placement} was already sent to {self.name}"
        self.sub_requests[id(placement)] = placement
        self._hit_blocks[id(placement)] = self._num_hit_blocks(placement)
        self._num_own_tokens += self._tokens(placement)
        self._since_report.add(id(placement))
        self._num_loads_since_report += self._is_load(placement)
        self._refresh()

    def ended(self, placement: Placement, *, are_hits_known: bool) -> None:
        """A sub-request has ended. `are_hits_known`: whether the router knows which blocks requests share. If
        not, the blocks count as free only after the worker has reported them."""
        without_blocks = set(islice(reversed(self.sub_requests), self._num_without_blocks()))
        had_blocks = placement.decode == self.name and id(placement) not in without_blocks
        del self.sub_requests[id(placement)]
        if id(placement) in self._since_report:
            self._since_report.remove(id(placement))
            self._num_loads_since_report -= self._is_load(placement)
        if had_blocks and are_hits_known:
            self._num_freed += max(0, placement.num_decode_blocks - max(self._hit_blocks.values()))
        del self._hit_blocks[id(placement)]
        self._num_own_tokens -= self._tokens(placement)
        self._refresh()

    def may_ever_hold(self, num_tokens: int) -> bool:
        """Whether the worker's empty pool could hold `num_tokens`."""
        return num_tokens <= self._most_tokens

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free, or will be free soon. Also true while this gateway has less than half of the requests
        that the worker may have. Otherwise, in a busy fleet, other gateways would keep all slots: each gateway is the
        first to learn that its own requests have ended."""
        return self.num_requests < self._most_requests or 2 * len(self.sub_requests) < self._most_requests

    @property
    def awaits_prompts(self) -> bool:
        """Whether most slots are kept for requests whose prompts prefill workers have not computed yet."""
        return 2 * self.status.requests.waiting_for_remote_kvs > self.status.max_num_seqs

    def has_blocks_for(self, num_tokens: int) -> bool:
        """Whether the worker has free blocks for `num_tokens`."""
        return self.room >= self.num_blocks_for(num_tokens)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` need. Blocks that left a sliding window are not counted."""
        return self._groups.num_held_blocks(num_tokens, self.block_size)

    @property
    def room_tokens(self) -> int:
        """The worker has room for at least this number of tokens."""
        return self.room * self.block_size // self._groups.num_groups

    def num_tokens_in_order(self, num_tokens: int) -> int:
        """The sum of min(prompt's tokens, `num_tokens`) over all prompts that wait on the worker. For prompts
        of other gateways, this is an upper bound, since only their number and their total of tokens are
        known."""
        own = sum(min(num_tokens, self._tokens(each)) for each in self.sub_requests.values())
        others = min(self._num_others_tokens, num_tokens * self._num_others)
        return min(self.num_waiting_tokens, own + others)

    def _refresh(self) -> None:
        self.num_requests = len(self.sub_requests) + self._num_others
        num_loads = self.status.requests.waiting_for_remote_kvs + self._num_loads_since_report
        self.num_here = max(0, self.num_requests - num_loads)
        self.num_waiting_tokens = self._num_waiting_tokens()
        num_awaited = sum(
            sub_request.num_decode_blocks for sub_request in self._youngest(self._num_without_blocks())
        )
        growth = self.num_requests * self._groups.num_groups
        self.room = self.status.kv_blocks.free - num_awaited + self._num_freed - growth

    def _num_without_blocks(self) -> int:
        counts = self.status.requests
        return max(
            len(self._since_report), len(self.sub_requests) - counts.running - counts.waiting_for_remote_kvs
        )

    def _num_hit_blocks(self, sub_request: Placement) -> int:
        """See `_hit_blocks`."""
        num_missing_tokens = (
            sub_request.num_prefill_tokens if sub_request.prefill is None else sub_request.num_transfer_tokens
        )
        return sub_request.num_decode_blocks - self.num_blocks_for(num_missing_tokens)

    def _num_waiting_tokens(self) -> int:
        """The lower of two upper bounds, each of which may be far too high. One is the tokens of all running
        prompts, some of which are partly computed. The other is the latest report, plus what was sent since
        then. The worker may have computed part of what it reported."""
        reported = self.status.load.num_queued_prompt_tokens
        num_unseen = max(len(self._since_report), len(self.sub_requests) - self._num_reported)
        reported += sum(self._tokens(sub_request) for sub_request in self._youngest(num_unseen))
        return min(reported, self._num_own_tokens + self._num_others_tokens)

    def _is_load(self, sub_request: Placement) -> bool:
        """Whether this worker gets the prompt's KV from a prefill worker."""
        return sub_request.prefill is not None and sub_request.decode == self.name

    def _tokens(self, sub_request: Placement) -> int:
        is_computed_here = sub_request.prefill == self.name or sub_request.prefill is None
        return sub_request.num_prefill_tokens if is_computed_here else 0

    def _youngest(self, num_sub_requests: int) -> list[Placement]:
        return list(islice(reversed(self.sub_requests.values()), num_sub_requests))
