"""Running: the requests that have no end yet, by what their callers call them."""

from baton.errors import InvalidRequest
from gateway.auth.callers import Caller
from gateway.requests.run import Run


class Running:
    """Callers have names of their own: nobody meets, or ends, what another one sent."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], dict[str, Run]] = {}
        """By the caller's name and the call's: answers to one call, by their own ids."""
        self._num_runs = 0

    def __len__(self) -> int:
        return self._num_runs

    def add(self, run: Run) -> None:
        """InvalidRequest if another one is called so."""
        answers = self._calls.setdefault(_call_of(run), {})
        request_id = run.generation.request_id
        if request_id in answers:
            raise InvalidRequest("request_id", f"{request_id!r} is in use by a running request")
        answers[request_id] = run
        self._num_runs += 1

    def remove(self, run: Run) -> None:
        answers = self._calls[_call_of(run)]
        del answers[run.generation.request_id]
        self._num_runs -= 1
        if not answers:
            del self._calls[_call_of(run)]

    def of_call(self, call_id: str, caller: Caller) -> list[Run]:
        """All answers that are still to be given to what this caller calls so."""
        return list(self._calls.get((caller.name, call_id), {}).values())


def _call_of(run: Run) -> tuple[str, str]:
    generation = run.generation
    return generation.caller.name, generation.call_id or generation.request_id
