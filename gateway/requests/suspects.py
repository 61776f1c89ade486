"""Suspects: requests that may be what ends their workers or breaks their steps; pure.

A worker may end at any moment, and most requests on it are bystanders. A request becomes suspect when a second worker
ends under it and its answer has got no further since the first: a bystander gets further in between. Suspects run one
at a time. When a fifth worker ends under a request, and no other request on that worker has lost five, the request has
done it, unless at least as many workers ended without it lately.

    lost once ----> lost again at the same place: suspect ----> and three times more: stopped
         <--- it finishes, or gets further ---

A worker that cannot compute a request says so (ErrorKind.STEP_FAILED) and lives. If two workers say so of the same
request, it is stopped too. Only workers that have finished other requests count, and that do not say it of many: a
model whose weights are wrong is no client's fault.

A stopped request is remembered by its caller, prompt and grammar, and refused as long as it comes again.
"""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from baton.errors import HarmfulRequest
from gateway.requests.request import GatewayRequest

Identity = bytes
"""The same for equal requests of one caller."""

SUSPECT_LOSSES = 2
MAX_LOSSES_AT_ONE_PLACE = 5
"""So many workers end because of one request, in all its attempts and repetitions together."""
MAX_FAILURES_OF_STEPS = 2
"""At different workers."""
MAX_BLAMED = 3
"""A worker that cannot compute more requests than this is at fault itself."""
REMEMBERED_S = 600.0
"""After the last loss or failure, or the last time that a stopped request came again."""
MAX_TURN_S = 10.0
"""How long a suspect keeps others waiting while it gets no further."""
RECENT_S = 60.0
"""Losses of other workers this long before a request's first one count in its favour."""
MAX_KEPT = 1024
MAX_LOSSES_KEPT = 64


@dataclass(slots=True)
class _Suspect:
    """What happened to equal requests of one caller."""

    first_at: float
    latest_at: float
    num_losses: int = 0
    """Workers that ended in a row while the answer was at the same place."""
    place: int = 0
    """How many tokens the client had."""
    failed_at: set[str] = field(default_factory=set)
    """Incarnations of workers that could not compute it."""


class Suspects:
    """Times are the caller's and must not run backwards."""

    def __init__(self) -> None:
        self._suspects: OrderedDict[Identity, _Suspect] = OrderedDict()
        """By their latest event, oldest first."""
        self._stopped: OrderedDict[Identity, tuple[float, str]] = OrderedDict()
        """When each was stopped or came again, oldest first, and why it was stopped."""
        self._losses: deque[tuple[float, frozenset[Identity]]] = deque(maxlen=MAX_LOSSES_KEPT)
        """When workers ended, and which requests they had."""
        self._proven: OrderedDict[str, None] = OrderedDict()
        """Incarnations of workers that had a part in a finished answer."""
        self._at_turn: Identity | None = None
        self._turn_ends_at = 0.0
        self.counts: Counter[str] = Counter(lost=0, failed=0, refused=0)
        """Requests that were stopped, by what they did, and how often stopped ones were refused."""

    def __len__(self) -> int:
        return len(self._suspects) + len(self._stopped)

    @property
    def num_stopped(self) -> int:
        """Requests that would be refused if they came again."""
        return len(self._stopped)

    def is_suspect(self, identity: Identity) -> bool:
        suspect = self._suspects.get(identity)
        return suspect is not None and suspect.num_losses >= SUSPECT_LOSSES

    def may_run(self, identity: Identity, now: float) -> bool:
        """False: another suspect runs, so that the loss of its worker would prove nothing."""
        return not self.is_suspect(identity) or self._at_turn is None or now >= self._turn_ends_at

    def placed(self, identity: Identity, now: float) -> None:
        if self.is_suspect(identity):
            self._at_turn, self._turn_ends_at = identity, now + MAX_TURN_S

    def left(self, identity: Identity) -> bool:
        """It has no worker any more. True: another suspect may run now."""
        is_over = identity == self._at_turn
        if is_over:
            self._at_turn = None
        return is_over

    def got_further(self, identity: Identity, place: int) -> bool:
        """It has so many tokens now. True: another suspect may run now."""
        suspect = self._suspects.get(identity)
        if suspect is None or not suspect.num_losses or place <= suspect.place + 1:
            return False
        self.cleared(identity)
        return self.left(identity)

    def refusal(self, identity: Identity, now: float) -> HarmfulRequest | None:
        """The error if this request was stopped."""
        self._expire(now)
        if (stopped := self._stopped.get(identity)) is None:
            return None
        self._remember(identity, stopped[1], now)
        self.counts["refused"] += 1
        return HarmfulRequest(stopped[1])

    def worker_lost(
        self, places: Mapping[Identity, int], had: frozenset[Identity], now: float
    ) -> tuple[Identity, HarmfulRequest] | None:
        """A worker ended. `places`: its requests, with the number of tokens that each client had; `had`: these, and the
        ones that left it earlier, in any attempt. Returns the request that is stopped for it, and the error."""
        self._expire(now)
        self._losses.append((now, had))
        for identity, place in places.items():
            suspect = self._touch(identity, now)
            # A prefill worker's token is no progress: each attempt brings one.
            is_same_place = suspect.num_losses > 0 and 0 <= place - suspect.place <= 1
            if not is_same_place:
                suspect.num_losses, suspect.first_at = 0, now
            suspect.num_losses += 1
            suspect.place = place
        blamed = [name for name in places if self._num_losses(name) >= MAX_LOSSES_AT_ONE_PLACE]
        if len(blamed) != 1 or self._num_lost_without(*blamed) >= self._num_losses(*blamed):
            return None
        num_losses = self._num_losses(*blamed)
        what = f"{num_losses} workers ended one after another while they ran it"
        return blamed[0], self._stop(blamed[0], "lost", what, now)

    def step_failed(self, identity: Identity, incarnation: str, now: float) -> HarmfulRequest | None:
        """This worker could not compute the request. Returns why it is stopped now, if it is."""
        self._expire(now)
        suspect = self._touch(identity, now)
        suspect.failed_at.add(incarnation)
        num_blamed = Counter(name for each in self._suspects.values() for name in each.failed_at)
        witnesses = {
            name for name in suspect.failed_at & self._proven.keys() if num_blamed[name] <= MAX_BLAMED
        }
        if len(witnesses) < MAX_FAILURES_OF_STEPS:
            return None
        return self._stop(identity, "failed", f"{len(witnesses)} workers could not compute it", now)

    def finished_on(self, incarnations: Iterable[str]) -> None:
        """An answer is complete to which these workers contributed."""
        for incarnation in incarnations:
            self._proven[incarnation] = None
            self._proven.move_to_end(incarnation)
        while len(self._proven) > MAX_KEPT:
            self._proven.popitem(last=False)

    def cleared(self, identity: Identity) -> None:
        """It is a bystander: it got further, or an equal one has finished."""
        self._suspects.pop(identity, None)

    def _num_losses(self, identity: Identity) -> int:
        suspect = self._suspects.get(identity)
        return suspect.num_losses if suspect else 0

    def _num_lost_without(self, identity: Identity) -> int:
        since = self._suspects[identity].first_at - RECENT_S
        return sum(at >= since and identity not in had for at, had in self._losses)

    def _stop(self, identity: Identity, why: str, what: str, now: float) -> HarmfulRequest:
        self.counts[why] += 1
        del self._suspects[identity]
        minutes = f"{REMEMBERED_S / 60:g} minutes"
        reason = f"the request was stopped: {what}. It is refused until it has not been sent for {minutes}; change it"
        self._remember(identity, reason, now)
        return HarmfulRequest(reason)

    def _remember(self, identity: Identity, reason: str, now: float) -> None:
        self._stopped[identity] = now, reason
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
        while self._stopped and next(iter(self._stopped.values()))[0] <= too_old:
            self._stopped.popitem(last=False)


def identity_of(request: GatewayRequest) -> Identity:
    """Equal for requests of one caller with the same prompt and grammar."""
    output = request.sampling_params.structured_output
    grammar = f"{output.kind.value} {output.source}" if output is not None else ""
    digest = blake2b(digest_size=16)
    for part in (
        request.caller.name.encode(),
        grammar.encode(),
        array("I", request.prompt_token_ids).tobytes(),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
