"""Suspects: requests that may have ended their workers or broken their steps; pure.

A worker may end at any moment, and most of its requests are bystanders: they did not cause the end. A request
becomes suspect when a second worker ends under it, and its answer has not grown since the first worker ended.
The answer of a bystander usually grows in between. Suspects take turns: those of this gateway, and those of all
gateways on one worker (worker/suspect_turns.py).

A request is stopped when a fifth worker ends under it at the same token. From the third worker on, a loss counts only
if the worker's last heartbeat named only this suspect. Otherwise another suspect may be the cause, or this
suspect did not run yet. Eight losses stop a request even if some of them do not count. In two cases a request is not
stopped: if another request on that worker has also lost too many workers, or if the workers that ended lately without
this request are at least as many as those that ended with it.

    lost once ----> lost again at the same token: suspect ----> lost three times more, alone: stopped
         <--- the request finishes, or its answer grows ---

A worker that cannot compute a request reports ErrorKind.STEP_FAILED and continues to run. A request is also
stopped when two workers report this error for it. A worker's report counts only if the worker has contributed
to a finished answer, and has reported the error for at most MAX_BLAMED requests, stopped ones included.
Otherwise the cause may be the worker itself, such as wrong model weights.

The gateway remembers the caller, prompt and grammar of a stopped request. It refuses equal requests until
none has been sent for REMEMBERED_S.
"""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from baton.errors import HarmfulRequest
from baton.request import SUSPECT_TURN_S
from baton.sampling import StructuredOutput

Identity = bytes
"""A digest of a request; the same for equal requests of one caller."""

SUSPECT_LOSSES = 2
MAX_LOSSES_AT_ONE_TOKEN = 5
"""After this many lost workers, a request is stopped. All attempts at equal requests count together."""
MAX_LOSSES_IN_ALL = 8
"""After this many lost workers, a request is stopped even if it was not the only suspect on them."""
MAX_FAILURES_OF_STEPS = 2
"""How many different workers must fail to compute a request before it is stopped."""
MAX_BLAMED = 3
"""If more requests than this fail on one worker, the worker itself is at fault."""
REMEMBERED_S = 600.0
"""How long a request is remembered after its last loss or failure, or its last refusal."""
TAKES_TURNS = "workers ended while they ran this request, so it must wait: such requests run one at a time"
RECENT_S = 60.0
"""Losses of workers that did not run a request count in the request's favour, if they are at most this much older than
the request's first loss."""
MAX_KEPT = 1024
MAX_LOSSES_KEPT = 64


@dataclass(slots=True)
class _Suspect:
    """What happened to equal requests of one caller."""

    first_at: float
    latest_at: float
    num_losses: int = 0
    """How many workers ended in a row while the answer did not grow."""
    num_shared: int = 0
    """How many of the `num_losses` workers may have run another suspect instead."""
    num_tokens: int = 0
    """How many tokens the client had at the latest loss."""
    failed_at: set[str] = field(default_factory=set)
    """Incarnations of workers that could not compute the request."""


class _Stopped(NamedTuple):
    """A request that is refused if it is sent again."""

    at: float
    """When the request was stopped or last sent again."""
    reason: str
    failed_at: frozenset[str]
    """As in _Suspect. If workers are at fault, the requests that they stop are no evidence against other workers."""


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """Which requests a worker had when it ended."""

    running: Mapping[Identity, int]
    """Requests that ran, each with the number of tokens that its client had."""
    ever_placed: frozenset[Identity]
    """The requests of `running`, and requests that were on the worker in an earlier attempt."""
    ran_alone: Identity | None = None
    """The suspect that ran on the worker, if no other suspect of any gateway ran there; else None."""


class Suspects:
    """The suspects and the stopped requests of one gateway. Times must not run backwards."""

    def __init__(self) -> None:
        self._suspects: OrderedDict[Identity, _Suspect] = OrderedDict()
        """Ordered by the latest loss or failure, oldest first."""
        self._stopped: OrderedDict[Identity, _Stopped] = OrderedDict()
        """Oldest first."""
        self._losses: deque[tuple[float, frozenset[Identity]]] = deque(maxlen=MAX_LOSSES_KEPT)
        """When each worker ended, and which requests it had."""
        self._proven: OrderedDict[str, None] = OrderedDict()
        """Incarnations of workers that contributed to a finished answer."""
        self._at_turn: Identity | None = None
        self._turn_ends_at = 0.0
        self.counts: Counter[str] = Counter(lost=0, failed=0, refused=0)
        """How many requests were stopped for worker losses (`lost`) or step failures (`failed`), and how many
        equal requests were refused afterwards."""

    def __len__(self) -> int:
        return len(self._suspects) + len(self._stopped)

    @property
    def num_stopped(self) -> int:
        """Requests that would be refused if they were sent again."""
        return len(self._stopped)

    def is_suspect(self, identity: Identity) -> bool:
        suspect = self._suspects.get(identity)
        return suspect is not None and suspect.num_losses >= SUSPECT_LOSSES

    def may_run(self, identity: Identity, now: float) -> bool:
        """Whether the request may run now. Suspects take turns, so that a loss shows which suspect caused it."""
        return not self.is_suspect(identity) or self._at_turn is None or now >= self._turn_ends_at

    def placed(self, identity: Identity, now: float) -> bool:
        """Call it when the request goes to its workers. If the request is a suspect, begins its turn and returns
        True."""
        if is_suspect := self.is_suspect(identity):
            self._at_turn, self._turn_ends_at = identity, now + SUSPECT_TURN_S
        return is_suspect

    def end_turn(self, identity: Identity) -> bool:
        """Ends the request's turn, if it has the turn. Returns True if another suspect may run now."""
        is_over = identity == self._at_turn
        if is_over:
            self._at_turn = None
        return is_over

    def got_further(self, identity: Identity, num_tokens: int) -> bool:
        """The answer has `num_tokens` tokens now. Returns True if another suspect may run now."""
        suspect = self._suspects.get(identity)
        if suspect is None or not suspect.num_losses or num_tokens <= suspect.num_tokens + 1:
            return False
        self.cleared(identity)
        return self.end_turn(identity)

    def refusal(self, identity: Identity, now: float) -> HarmfulRequest | None:
        """The error for a request that was stopped, or that equals a stopped request; None for all other requests."""
        self._expire(now)
        if (stopped := self._stopped.get(identity)) is None:
            return None
        self._remember(identity, stopped._replace(at=now))
        self.counts["refused"] += 1
        return HarmfulRequest(stopped.reason)

    def worker_lost(self, loss: WorkerLoss, now: float) -> tuple[Identity, HarmfulRequest] | None:
        """Counts the loss of a worker. Returns the request that is stopped because of this loss, and the error for it;
        None if no request is stopped."""
        self._expire(now)
        self._losses.append((now, loss.ever_placed))
        for identity, num_tokens in loss.running.items():
            suspect = self._touch(identity, now)
            # One more token is no progress: in each attempt, the prefill worker brings one.
            is_same_token = suspect.num_losses > 0 and 0 <= num_tokens - suspect.num_tokens <= 1
            if not is_same_token:
                suspect.num_losses, suspect.num_shared, suspect.first_at = 0, 0, now
            suspect.num_shared += suspect.num_losses >= SUSPECT_LOSSES and identity != loss.ran_alone
            suspect.num_losses += 1
            suspect.num_tokens = num_tokens
        blamed = [name for name in loss.running if self._has_lost_too_many(name)]
        if len(blamed) != 1:
            return None
        num_losses = self._suspects[blamed[0]].num_losses
        if self._num_lost_without(blamed[0]) >= num_losses:
            return None
        what = f"{num_losses} workers ended one after another while they ran the request"
        return blamed[0], self._stop(blamed[0], "lost", what, now)

    def step_failed(self, identity: Identity, incarnation: str, now: float) -> HarmfulRequest | None:
        """Counts that this worker could not compute the request. Returns the error if the request is stopped now;
        otherwise None."""
        self._expire(now)
        suspect = self._touch(identity, now)
        suspect.failed_at.add(incarnation)
        num_blamed = Counter(name for each in self._suspects.values() for name in each.failed_at)
        num_blamed.update(name for each in self._stopped.values() for name in each.failed_at)
        witnesses = {
            name for name in suspect.failed_at & self._proven.keys() if num_blamed[name] <= MAX_BLAMED
        }
        if len(witnesses) < MAX_FAILURES_OF_STEPS:
            return None
        return self._stop(identity, "failed", f"{len(witnesses)} workers could not compute the request", now)

    def finished_on(self, incarnations: Iterable[str]) -> None:
        """Notes that these workers contributed to a complete answer."""
        for incarnation in incarnations:
            self._proven[incarnation] = None
            self._proven.move_to_end(incarnation)
        while len(self._proven) > MAX_KEPT:
            self._proven.popitem(last=False)

    def cleared(self, identity: Identity) -> None:
        """Forgets the losses and failures of a request that is a bystander, since its answer grew, or since an equal
        request has finished."""
        self._suspects.pop(identity, None)

    def _has_lost_too_many(self, identity: Identity) -> bool:
        if (suspect := self._suspects.get(identity)) is None:
            return False
        num_certain = suspect.num_losses - suspect.num_shared
        return num_certain >= MAX_LOSSES_AT_ONE_TOKEN or suspect.num_losses >= MAX_LOSSES_IN_ALL

    def _num_lost_without(self, identity: Identity) -> int:
        since = self._suspects[identity].first_at - RECENT_S
        return sum(at >= since and identity not in requests for at, requests in self._losses)

    def _stop(self, identity: Identity, why: str, what: str, now: float) -> HarmfulRequest:
        self.counts[why] += 1
        failed_at = frozenset(self._suspects.pop(identity).failed_at)
        minutes = f"{REMEMBERED_S / 60:g} minutes"
        reason = (
            f"the request was stopped: {what}. Change it; the same request is refused until it has not been sent for "
            f"{minutes}"
        )
        self._remember(identity, _Stopped(now, reason, failed_at))
        return HarmfulRequest(reason)

    def _remember(self, identity: Identity, stopped: _Stopped) -> None:
        self._stopped[identity] = stopped
        self._stopped.move_to_end(identity)
        if len(self._stopped) > MAX_KEPT:
            self._stopped.popitem(last=False)

    def _touch(self, identity: Identity, now: float) -> _Suspect:
        suspect = self._suspects.setdefault(identity, _Suspect(now, now))
        suspect.latest_at = now
        self._suspects.move_to_end(identity)
        if len(self._suspects) > MAX_KEPT:
            self._suspects.popitem(last=False)
        return suspect

    def _expire(self, now: float) -> None:
        too_old = now - REMEMBERED_S
        while self._suspects and next(iter(self._suspects.values())).latest_at <= too_old:
            self._suspects.popitem(last=False)
        while self._stopped and next(iter(self._stopped.values())).at <= too_old:
            self._stopped.popitem(last=False)


def identity_of(caller: str, prompt_token_ids: Sequence[int], output: StructuredOutput | None) -> Identity:
    """Equal for requests of one caller with the same prompt and grammar."""
    grammar = f"{output.kind.value} {output.source}" if output is not None else ""
    digest = blake2b(digest_size=16)
    for part in (caller.encode(), grammar.encode(), array("I", prompt_token_ids).tobytes()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
