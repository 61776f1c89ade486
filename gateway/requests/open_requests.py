"""OpenRequests: the requests whose streams have not ended, also by their callers' ids; pure."""

from baton.errors import InvalidRequest, RequestError
from gateway.auth.callers import Caller
from gateway.auth.limits import Concurrency
from gateway.requests.request import GatewayRequest
from gateway.requests.request_state import RequestState


class OpenRequests:
    """Ids are separate for each caller: no caller can collide with, or end, another caller's request."""

    def __init__(self) -> None:
        self._states: dict[GatewayRequest, RequestState] = {}
        self._admitted: dict[tuple[str, str], dict[str, RequestState]] = {}
        """By the caller's name and the call's id, then by the request's own id."""
        self._concurrency = Concurrency()

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, request: GatewayRequest) -> RequestState:
        return self._states[request]

    def add(self, state: RequestState) -> RequestError | None:
        """Opens a request. Returns why it must not run, if its id is in use or its caller has too many requests."""
        request = state.request
        self._states[request] = state
        answers = self._admitted.get(_call_of(request), {})
        if request.request_id in answers:
            return InvalidRequest("request_id", f"{request.request_id!r} is in use by a running request")
        if error := self._concurrency.begin(request.caller):
            return error
        self._admitted.setdefault(_call_of(request), answers)[request.request_id] = state
        return None

    def remove(self, request: GatewayRequest) -> RequestState:
        """Closes a request, whether or not it was admitted."""
        state = self._states.pop(request)
        answers = self._admitted.get(_call_of(request), {})
        if answers.get(request.request_id) is state:
            del answers[request.request_id]
            if not answers:
                del self._admitted[_call_of(request)]
            self._concurrency.end(request.caller)
        return state

    def of_call(self, call_id: str, caller: Caller) -> list[GatewayRequest]:
        """All open requests of one call."""
        return [state.request for state in self._admitted.get((caller.name, call_id), {}).values()]


def _call_of(request: GatewayRequest) -> tuple[str, str]:
    return request.caller.name, request.call_id or request.request_id
