"""ClientRequests: the client (a gateway) and the deadline of each unfinished request.

Knows no thread and no queue. The loop calls it on the engine's thread, the simulator in virtual time.
"""

import heapq
from collections.abc import Iterable, KeysView

from baton.clock import Clock
from baton.errors import InvalidRequest, Overloaded, RequestError
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput
from baton.step import ClientOutputs
from scheduler import RequestStatus
from worker.core import EngineCore
from worker.role import Role

MAX_TIMEOUT_S = 1e9
"""The longest time until a deadline, some 30 years. For a much longer time, or for one that is no number, the engine
cannot wait."""


class ClientRequests:
    """Adds the clients' requests to the core, and ends them.

    The caller delivers the outputs that a call returns, and passes them to `forget_ended`.
    """

    def __init__(self, core: EngineCore, clock: Clock) -> None:
        self._core = core
        self._clock = clock
        self._clients: dict[str, str] = {}
        """By request: its client."""
        self._deadlines: list[tuple[float, str]] = []
        """A heap. It may contain requests that have ended."""

    @property
    def request_ids(self) -> KeysView[str]:
        """Every request that was admitted, until `forget_ended` has seen its end."""
        return self._clients.keys()

    def of_client(self, client_id: str) -> tuple[str, ...]:
        """This client's requests, the oldest first."""
        return tuple(request_id for request_id, owner in self._clients.items() if owner == client_id)

    def admit(self, client_id: str, request: EngineRequest, role: Role) -> None:
        """Adds a request. Raises a RequestError if the role or the core refuses the request."""
        if request.request_id in self._clients:
            raise InvalidRequest("request_id", f"{request.request_id} is in use")
        if request.timeout_s is not None and not request.timeout_s <= MAX_TIMEOUT_S:
            raise InvalidRequest("timeout_s", f"must be at most {MAX_TIMEOUT_S:g}, got {request.timeout_s}")
        role.admit(request, self._core.scheduler.request_counts())
        self._core.add_request(request, client_id)
        self._clients[request.request_id] = client_id
        if request.timeout_s is not None:
            heapq.heappush(self._deadlines, (self._clock.now() + request.timeout_s, request.request_id))

    def decline(self, request: EngineRequest) -> None:
        """Notifies the prefill worker of a refused request. Does nothing if a request with the same id runs."""
        if request.request_id not in self._clients:
            self._core.decline(request)

    def abort(self, client_id: str, request_ids: Iterable[str]) -> ClientOutputs:
        """Ends these requests of this client, in this order; other clients' requests are not affected."""
        own = [request_id for request_id in request_ids if self._clients.get(request_id) == client_id]
        return self._core.finish_requests(own, RequestStatus.FINISHED_ABORTED)

    def abort_client(self, client_id: str) -> ClientOutputs:
        """Ends all requests of a client that is gone."""
        return self.abort(client_id, self.of_client(client_id))

    def end_overdue(self) -> ClientOutputs:
        """Ends the requests whose deadlines have passed."""
        now, overdue = self._clock.now(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            overdue.append(heapq.heappop(self._deadlines)[1])
        if not overdue:
            return ClientOutputs()
        status, error = RequestStatus.FINISHED_ABORTED, "the request's deadline passed"
        return self._core.finish_requests(overdue, status, error)

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def forget_ended(self, outputs: Iterable[RequestOutput]) -> None:
        """Forgets the requests that end with these outputs."""
        for output in outputs:
            if output.finish_reason is not None:
                self._clients.pop(output.request_id, None)
        if not self._clients or len(self._deadlines) > 2 * len(self._clients) + 64:  # most have ended
            self._deadlines = [each for each in self._deadlines if each[1] in self._clients]
            heapq.heapify(self._deadlines)


def last_output(request: EngineRequest) -> RequestOutput:
    """The only output of a request that was aborted before the engine knew it."""
    num_tokens = len(request.output_token_ids)
    return RequestOutput(request.request_id, num_tokens, finish_reason=FinishReason.ABORT)


def refusal(request_id: str, error: RequestError) -> RequestOutput:
    """The only output of a request that was not admitted."""
    kinds = {InvalidRequest: ErrorKind.INVALID_REQUEST, Overloaded: ErrorKind.OVERLOADED}
    return RequestOutput(
        request_id=request_id,
        first_position=0,
        finish_reason=FinishReason.ERROR,
        error=str(error),
        error_kind=kinds.get(type(error), ErrorKind.INTERNAL),
    )
