"""OpenRequests: the requests whose streams have not ended, and a look-up by the caller and the id of its call; pure."""

from collections.abc import Iterator

from baton.errors import InvalidRequest, RequestError
from baton.worker import WorkerStatus
from gateway.admission.suspects import Identity, WorkerLoss
from gateway.auth.callers import Caller
from gateway.auth.limits import CallerRates, Concurrency
from gateway.requests.request import GatewayRequest
from gateway.requests.request_state import RequestPhase, RequestState


class OpenRequests:
    """All open requests. Ids are separate for each caller, so no caller can end another caller's request."""

    def __init__(self) -> None:
        self._states: dict[GatewayRequest, RequestState] = {}
        self._admitted: dict[tuple[str, str], dict[str, RequestState]] = {}
        """Admitted requests, by the caller's name and the call's id, then by the request's own id."""
        self._concurrency = Concurrency()
        self._token_rates = CallerRates("tokens")

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def lost_with(self, status: WorkerStatus) -> WorkerLoss:
        """The requests of a worker that has ended. `status`: its last heartbeat.

        If the heartbeat names a suspect, this suspect ran on the worker. Its attempt may have failed since the
        heartbeat, for example because the other worker of the pair refused it.
        """
        ref, running, named = status.ref, dict[Identity, int](), dict[str, Identity]()
        ever_placed = [each for each in self if any(a.refs.get(ref.name) == ref for a in each.attempts)]
        for state in ever_placed:
            is_placed = state.phase is RequestPhase.PLACED and ref.name in state.attempt.open_workers
            ids = {each.engine_request_id for each in state.attempts}.intersection(status.suspects)
            named |= dict.fromkeys(ids, state.identity)
            if is_placed or ids:
                running[state.identity] = min(state.num_output_tokens, running.get(state.identity, 2**31))
        names_one = len(named) == len(status.suspects) and len(set(named.values())) == 1
        ran_alone = next(iter(named.values())) if names_one else None
        return WorkerLoss(running, frozenset(state.identity for state in ever_placed), ran_alone)

    def __getitem__(self, request: GatewayRequest) -> RequestState:
        return self._states[request]

    def add(self, state: RequestState, now: float) -> RequestError | None:
        """Opens a request. Returns an error if it must not run: its id is in use, or its caller has used up a limit.

        If a call has several answers, only the first answer is checked against the caller's token limit.
        """
        request = state.request
        self._states[request] = state
        answers = self._admitted.get(request.call, {})
        if request.request_id in answers:
            return InvalidRequest("request_id", f"{request.request_id!r} is in use by a running request")
        if request.call_id is None and (error := self._token_rates.check(request.caller, now)):
            return error
        if error := self._concurrency.begin(request.caller):
            return error
        self._token_rates.count(request.caller, _num_prompt_tokens(request), now)
        self._admitted.setdefault(request.call, answers)[request.request_id] = state
        return None

    def count_answer(self, request: GatewayRequest, num_tokens: int, now: float) -> None:
        """Counts tokens of an answer against the caller's rate as soon as they arrive."""
        self._token_rates.count(request.caller, num_tokens, now)

    def remove(self, request: GatewayRequest, now: float) -> RequestState:
        """Closes a request, whether or not it was admitted. If no worker got the request, its prompt does not
        count.
        """
        state = self._states.pop(request)
        answers = self._admitted.get(request.call, {})
        if answers.get(request.request_id) is state:
            del answers[request.request_id]
            if not answers:
                del self._admitted[request.call]
            self._concurrency.end(request.caller)
            if not state.num_attempts:
                self._token_rates.count(request.caller, -_num_prompt_tokens(request), now)
        return state

    def of_call(self, call_id: str, caller: Caller) -> list[GatewayRequest]:
        """All open requests of one call."""
        return [state.request for state in self._admitted.get((caller.name, call_id), {}).values()]


def _num_prompt_tokens(request: GatewayRequest) -> int:
    return 0 if request.repeats_prompt else len(request.prompt_token_ids)
