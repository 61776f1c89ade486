"""Work that a scheduler still has to do, as input for routing; reads only the states of requests."""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.request import Request, RequestStatus

_MAY_BE_NEW = {RequestStatus.WAITING, RequestStatus.WAITING_FOR_FSM}


@dataclass(frozen=True, slots=True)
class WaitingLoad:
    """Unfinished work of this scheduler."""

    num_prompt_tokens: int
    """Tokens of prompts, and of output sampled on other workers, that this worker must compute before their requests
    can decode."""
    oldest_arrival: float | None
    """Earliest `Request.arrival_time` of the requests that wait for their first step; None without such
    requests."""


def waiting_load(requests: Iterable[Request]) -> WaitingLoad:
    """Work of all unfinished requests, except for prompts that other workers compute."""
    num_prompt_tokens, oldest = 0, None
    for request in requests:
        if request.may_load or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            continue
        num_missing = len(request.all_token_ids) - request.num_computed_tokens
        if num_missing > 1:
            num_prompt_tokens += num_missing
        if _waits_for_first_step(request) and (oldest is None or request.arrival_time < oldest):
            oldest = request.arrival_time
    return WaitingLoad(num_prompt_tokens, oldest)


def _waits_for_first_step(request: Request) -> bool:
    """False for a request that has run, and begins again after a failed step. Such a request has new tokens. A consumer
    gets its first new token together with its prompt, so this token does not count."""
    num_given = request.num_initial_tokens + request.is_consumer
    return request.status in _MAY_BE_NEW and len(request.all_token_ids) <= num_given
