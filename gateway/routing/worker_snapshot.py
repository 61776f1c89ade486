"""WorkerSnapshot: one worker's current state: its latest report, and what this gateway has sent it since.

A worker reports twice a second, and others may send it requests too, so neither source is complete:

    ours now        +   reported beyond ours               requests, and prompt tokens that wait
    free as reported -   blocks for requests without any yet
                    +   blocks returned by ended requests    blocks

Requests have no blocks yet if they were sent after the latest report, or if it counts fewer requests with blocks than
we sent; then the youngest are those without. The estimate errs towards too few blocks. A prompt counts with all its
blocks, even if it shares some with running requests. An ended request returns no block that it may share: neither the
prefix that the worker had when it came, nor as much as any other request found.
"""

from itertools import islice

from baton.worker import WorkerRole, WorkerState, WorkerStatus
from gateway.routing.placement import Placement
from gateway.routing.rates import MovingAverage, StepTime


class WorkerSnapshot:
    """State of the worker of one name. Costs of a look are attributes, up to date after each call."""

    __slots__ = (
        "_num_given_back",
        "_num_others",
        "_num_others_tokens",
        "_num_own_tokens",
        "_num_told",
        "_since_word",
        "_status",
        "block_size",
        "decode_step",
        "is_gone",
        "name",
        "num_requests",
        "num_waiting_tokens",
        "prefill_rate",
        "room",
        "sub_requests",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.sub_requests: dict[int, Placement] = {}
        """Running requests, oldest first; by identity, since two may be equal."""
        self.is_gone = True
        """Unknown, or lost."""
        self.num_requests = 0
        """Requests there, or on their way."""
        self.num_waiting_tokens = 0
        """Prompt tokens that it must compute."""
        self.block_size = 1
        self.room = 0
        """Free blocks, less those promised, and less one for each request that grows there."""
        self.prefill_rate = MovingAverage()
        self.decode_step = StepTime()
        self._status: WorkerStatus | None = None
        self._since_word: set[int] = set()
        """Requests sent since its latest report."""
        self._num_given_back = 0
        self._num_told = 0
        self._num_own_tokens = 0
        self._num_others = 0
        self._num_others_tokens = 0

    @property
    def status(self) -> WorkerStatus:
        assert self._status is not None, f"{self.name} has sent no status yet"
        return self._status

    @property
    def service(self) -> WorkerRole | None:
        """The kind of requests that it takes at present."""
        if self.is_gone or self.status.state is not WorkerState.READY:
            return None
        return self.status.role

    def heard(self, status: WorkerStatus) -> None:
        self._status = status
        self.block_size = status.ref.block_size
        counts = status.requests
        self._num_told = counts.running + counts.waiting + counts.waiting_for_remote_kvs
        self.is_gone = status.state.has_ended
        self._since_word.clear()
        self._num_given_back = 0
        self._num_others = max(0, self._num_told - len(self.sub_requests))
        self._num_others_tokens = max(0, status.load.num_queued_prompt_tokens - self._num_own_tokens)
        if status.load.prefill_tokens_per_s > 0.0:
            self.prefill_rate.add(status.load.prefill_tokens_per_s)
        if status.load.decode_step_s > 0.0:
            self.decode_step.add(max(1, status.requests.running), status.load.decode_step_s)
        self._refresh()

    def gone(self) -> None:
        self.is_gone = True

    def is_of_another_life(self, status: WorkerStatus) -> bool:
        return self._status is not None and self._status.ref.incarnation != status.ref.incarnation

    def sent(self, placement: Placement) -> None:
        assert id(placement) not in self.sub_requests, f"{placement} was already sent to {self.name}"
        self.sub_requests[id(placement)] = placement
        self._num_own_tokens += self._tokens(placement)
        self._since_word.add(id(placement))
        self._refresh()

    def ended(self, placement: Placement, *, are_hits_known: bool) -> None:
        """If it is unknown what requests share, its blocks count as free only once the worker reports them."""
        without_blocks = set(islice(reversed(self.sub_requests), self._num_without_blocks()))
        had_blocks = placement.decode == self.name and id(placement) not in without_blocks
        del self.sub_requests[id(placement)]
        self._since_word.discard(id(placement))
        if had_blocks and are_hits_known:
            shared = max(map(self._num_hit_blocks, [placement, *self.sub_requests.values()]))
            self._num_given_back += max(0, placement.num_decode_blocks - shared)
        self._num_own_tokens -= self._tokens(placement)
        self._refresh()

    def may_ever_hold(self, num_tokens: int) -> bool:
        """Whether its pool could hold so many tokens if it were empty."""
        return self.status.kv_blocks.total >= self.num_blocks_for(num_tokens)

    def fits(self, num_tokens: int) -> bool:
        """Whether it has free blocks for so many tokens."""
        return self.room >= self.num_blocks_for(num_tokens)

    @property
    def has_none_of_ours(self) -> bool:
        return not self.sub_requests

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _refresh(self) -> None:
        if self._status is None:
            return  # requests of a former incarnation
        self.num_requests = len(self.sub_requests) + self._num_others
        self.num_waiting_tokens = self._num_waiting_tokens()
        spoken_for = sum(
            sub_request.num_decode_blocks for sub_request in self._youngest(self._num_without_blocks())
        )
        self.room = self._status.kv_blocks.free - spoken_for + self._num_given_back - self.num_requests

    def _num_without_blocks(self) -> int:
        if self._status is None:
            return len(self.sub_requests)
        counts = self._status.requests
        return max(
            len(self._since_word), len(self.sub_requests) - counts.running - counts.waiting_for_remote_kvs
        )

    def _num_hit_blocks(self, sub_request: Placement) -> int:
        """What this worker had of a prompt that it decodes, as far as known."""
        lacking = (
            sub_request.num_prefill_tokens if sub_request.prefill is None else sub_request.num_transfer_tokens
        )
        return sub_request.num_decode_blocks - self.num_blocks_for(lacking)

    def _num_waiting_tokens(self) -> int:
        """The lower of two bounds, each of which may be far too high. One is all of our running prompts, some of
        which are partly computed. The other is its report, of which some is computed by now, plus what was sent
        since."""
        as_told = self.status.load.num_queued_prompt_tokens
        num_unseen = max(len(self._since_word), len(self.sub_requests) - self._num_told)
        as_told += sum(self._tokens(sub_request) for sub_request in self._youngest(num_unseen))
        return min(as_told, self._num_own_tokens + self._num_others_tokens)

    def _tokens(self, sub_request: Placement) -> int:
        is_computed_here = sub_request.prefill == self.name or sub_request.prefill is None
        return sub_request.num_prefill_tokens if is_computed_here else 0

    def _youngest(self, num_sub_requests: int) -> list[Placement]:
        return list(islice(reversed(self.sub_requests.values()), num_sub_requests))
