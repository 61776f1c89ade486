"""Router: which workers a request goes to; pure logic, so that a simulation can run it too.

Fed with what workers say of themselves (`heard`, `gone`) and with what the gateway does (`sent`, `ended`); asked by
`route`. It reads no clock: whoever calls passes the time.
"""

from collections import Counter
from collections.abc import Collection
from itertools import count

from baton.config import GatewayConfig
from baton.errors import WorkerUnavailable
from baton.request import StageTimes
from baton.worker import WorkerRole, WorkerState, WorkerStatus
from gateway.routing.placement import Ask, Mode, Placement


class Router:
    """Chooses pairs, as the keys `routing_*` of the gateway's configuration say."""

    def __init__(self, config: GatewayConfig) -> None:
        self._policy = config.routing_policy
        self._default_mode = Mode(config.routing_mode)
        self._turn = count()
        self._workers: dict[str, WorkerStatus] = {}
        self.num_legs: Counter[str] = Counter()
        """Legs under way by worker."""

    def heard(self, status: WorkerStatus) -> None:
        """A worker's word on itself; the first one makes it known, if it takes requests."""
        if status.state is WorkerState.READY:
            self._workers[status.ref.name] = status
        else:
            self._workers.pop(status.ref.name, None)

    def gone(self, name: str) -> None:
        """Lost, silent or removed: it gets nothing until it is heard again. Unknown names are no error."""
        self._workers.pop(name, None)

    def sent(self, worker: str, placement: Placement) -> None:
        """A leg of a placement was sent to one of its workers: known at once, unlike what it says of itself."""
        self.num_legs[worker] += 1

    def ended(self, worker: str, placement: Placement) -> None:
        """A leg that was `sent` is over, whatever became of it or of the worker. Exactly once for each."""
        self.num_legs[worker] -= 1

    def measured(self, placement: Placement, times: StageTimes) -> None:
        """What the decode leg of a placement tells at its end."""

    def route(self, ask: Ask) -> Placement:
        """A placement without excluded workers; NoRoom if all are full, WorkerUnavailable if there is none.

        A request that asks for disaggregation never runs locally; another may, when no prefill worker is left.
        """
        turn = next(self._turn)
        decoder = self._choose(WorkerRole.DECODE, ask.excluded, turn)
        if decoder is None:
            raise WorkerUnavailable("no decode worker is available")
        if (ask.mode or self._default_mode) is Mode.LOCAL:
            return Placement(Mode.LOCAL, None, decoder, reason="asked")
        prefiller = None if ask.without_prefill else self._choose(WorkerRole.PREFILL, ask.excluded, turn)
        if prefiller is not None:
            return Placement(Mode.DISAGGREGATED, prefiller, decoder)
        if ask.mode is Mode.DISAGGREGATED:
            raise WorkerUnavailable("no prefill worker is available, and the request requires one")
        return Placement(Mode.LOCAL, None, decoder, is_fallback=True, reason="no prefill worker")

    def _choose(self, role: WorkerRole, excluded: Collection[str], turn: int) -> str | None:
        able = sorted(
            name for name, status in self._workers.items() if status.role is role and name not in excluded
        )
        if not able:
            return None
        rotated = able[turn % len(able) :] + able[: turn % len(able)]
        return rotated[0] if self._policy == "round_robin" else min(rotated, key=self._num_requests)

    def _num_requests(self, name: str) -> int:
        counts = self._workers[name].requests
        told = counts.running + counts.waiting + counts.waiting_for_remote_kvs
        return max(told, self.num_legs[name])
