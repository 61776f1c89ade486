"""WorkerSnapshot: how one worker stands now: what it said of itself last, and what this gateway has sent it since.

A worker speaks twice a second, and others may send it requests too, so neither is the whole truth:

    of ours, now   +   what it told beyond ours, then       requests, and prompt tokens that wait
    free as told   -   what legs will take that have none
                   +   what legs gave back that had some    blocks

Requests have none yet if they were sent after its last word, or if it told of fewer requests with blocks than we sent
it; then the youngest are those without. It errs towards too few: a prompt counts with all its blocks, even if it shares
some with requests that run there, and a leg that ends gives back none that it may share: of its chain, neither what the
worker had of it when it came, nor as much as any other leg found.
"""

from itertools import islice

from baton.worker import WorkerRole, WorkerState, WorkerStatus
from gateway.routing.placement import Placement
from gateway.routing.rates import MovingAverage, StepTime


class WorkerSnapshot:
    """Of one name. Costs of a look are attributes, up to date after each call."""

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
        "legs",
        "name",
        "num_requests",
        "num_waiting_tokens",
        "prefill_rate",
        "room",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.legs: dict[int, Placement] = {}
        """Under way, oldest first; by identity, since two may be equal."""
        self.is_gone = True
        """Not heard of, or not any more."""
        self.num_requests = 0
        """There, or on their way to it."""
        self.num_waiting_tokens = 0
        """Of prompts that it is to compute."""
        self.block_size = 1
        self.room = 0
        """Free blocks, less those spoken for, and less one for each request that grows there."""
        self.prefill_rate = MovingAverage()
        self.decode_step = StepTime()
        self._status: WorkerStatus | None = None
        self._since_word: set[int] = set()
        """Requests that it cannot have reported."""
        self._num_given_back = 0
        self._num_told = 0
        self._num_own_tokens = 0
        self._num_others = 0
        self._num_others_tokens = 0

    @property
    def status(self) -> WorkerStatus:
        assert self._status is not None, f"{self.name} said nothing yet"
        return self._status

    @property
    def service(self) -> WorkerRole | None:
        """What requests it takes at present."""
        if self.is_gone or self.status.state is not WorkerState.READY:
            return None
        return self.status.role

    def heard(self, status: WorkerStatus) -> None:
        self._status = status
        self.block_size = status.ref.block_size
        counts = status.requests
        self._num_told = counts.running + counts.waiting + counts.waiting_for_remote_kvs
        self.is_gone = status.state in (WorkerState.STOPPED, WorkerState.DEAD)
        self._since_word.clear()
        self._num_given_back = 0
        self._num_others = max(0, self._num_told - len(self.legs))
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
        assert id(placement) not in self.legs, f"{placement} was sent to {self.name} before"
        self.legs[id(placement)] = placement
        self._num_own_tokens += self._tokens(placement)
        self._since_word.add(id(placement))
        self._refresh()

    def ended(self, placement: Placement, *, are_hits_known: bool) -> None:
        """Without knowing what legs share, its blocks count as free only when the worker says so."""
        without_blocks = set(islice(reversed(self.legs), self._num_without_blocks()))
        had_blocks = placement.decode == self.name and id(placement) not in without_blocks
        del self.legs[id(placement)]
        self._since_word.discard(id(placement))
        if had_blocks and are_hits_known:
            shared = max(map(self._num_hit_blocks, [placement, *self.legs.values()]))
            self._num_given_back += max(0, placement.num_decode_blocks - shared)
        self._num_own_tokens -= self._tokens(placement)
        self._refresh()

    def may_ever_hold(self, num_tokens: int) -> bool:
        """Whether so many fit into its pool when nobody else is there."""
        return self.status.kv_blocks.total >= self.num_blocks_for(num_tokens)

    def fits(self, num_tokens: int) -> bool:
        """Whether it has blocks for so many."""
        return self.room >= self.num_blocks_for(num_tokens)

    @property
    def has_none_of_ours(self) -> bool:
        return not self.legs

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _refresh(self) -> None:
        if self._status is None:
            return  # legs of a former life
        self.num_requests = len(self.legs) + self._num_others
        self.num_waiting_tokens = self._num_waiting_tokens()
        spoken_for = sum(leg.num_decode_blocks for leg in self._youngest(self._num_without_blocks()))
        self.room = self._status.kv_blocks.free - spoken_for + self._num_given_back - self.num_requests

    def _num_without_blocks(self) -> int:
        if self._status is None:
            return len(self.legs)
        counts = self._status.requests
        return max(len(self._since_word), len(self.legs) - counts.running - counts.waiting_for_remote_kvs)

    def _num_hit_blocks(self, leg: Placement) -> int:
        """What this worker had of a prompt that it was to decode, as far as was known."""
        lacking = leg.num_prefill_tokens if leg.prefill is None else leg.num_transfer_tokens
        return leg.num_decode_blocks - self.num_blocks_for(lacking)

    def _num_waiting_tokens(self) -> int:
        """Two bounds, each of which may be far too high: all of our prompts that are under way, some of which are
        partly computed; and what it told and has computed some of since, with what was sent after that."""
        as_told = self.status.load.num_queued_prompt_tokens
        num_unseen = max(len(self._since_word), len(self.legs) - self._num_told)
        as_told += sum(self._tokens(leg) for leg in self._youngest(num_unseen))
        return min(as_told, self._num_own_tokens + self._num_others_tokens)

    def _tokens(self, leg: Placement) -> int:
        is_computed_here = leg.prefill == self.name or leg.prefill is None
        return leg.num_prefill_tokens if is_computed_here else 0

    def _youngest(self, num_legs: int) -> list[Placement]:
        return list(islice(reversed(self.legs.values()), num_legs))
