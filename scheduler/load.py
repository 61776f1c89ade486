"""What waits at a scheduler, for whoever chooses where the next request goes; knows requests, not why they wait."""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.request import Request, RequestStatus

_HAS_NOT_RUN = {RequestStatus.WAITING, RequestStatus.WAITING_FOR_FSM}


@dataclass(frozen=True, slots=True)
class WaitingLoad:
    """Work that is here and not done."""

    num_prompt_tokens: int
    """To be computed here before a request can go on token by token: of prompts, and of what was sampled elsewhere."""
    oldest_arrival: float | None
    """Of the requests that wait for their first step; as `Request.arrival_time`. None if none waits."""


def waiting_load(requests: Iterable[Request]) -> WaitingLoad:
    """Of all unfinished requests. Prompts that come from other workers are theirs to compute."""
    num_prompt_tokens, oldest = 0, None
    for request in requests:
        if request.may_load or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            continue
        num_missing = len(request.all_token_ids) - request.num_computed_tokens
        if num_missing > 1:
            num_prompt_tokens += num_missing
        if request.status in _HAS_NOT_RUN and (oldest is None or request.arrival_time < oldest):
            oldest = request.arrival_time
    return WaitingLoad(num_prompt_tokens, oldest)
