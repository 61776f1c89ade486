"""What the simulated gateway knows of a client's request, and how an attempt at it fails."""

from dataclasses import dataclass, field
from enum import Enum

from baton.request import ErrorKind, RequestOutput
from gateway.routing.placement import Placement
from tests.simulation.device import answer
from tests.simulation.scenario import MAX_MODEL_LEN, RequestSpec


class End(Enum):
    DONE = "done"
    ERROR = "error"
    LEFT = "left"


class AttemptFailed(Exception):
    """As in the dispatcher."""

    def __init__(
        self, worker: str, reason: str, *, is_prompt_lost: bool = False, may_ask_again: bool = False
    ) -> None:
        super().__init__(reason)
        self.worker = worker
        self.is_prompt_lost = is_prompt_lost
        self.may_ask_again = may_ask_again


class RequestFailed(Exception):
    """The client is told."""


@dataclass(slots=True)
class Attempt:
    engine_request_id: str
    placement: Placement
    decoder_copes: bool
    open_legs: set[str] = field(default_factory=set)


@dataclass(slots=True)
class ClientRequest:
    """A client's request from its arrival to its one end."""

    spec: RequestSpec
    arrived_at: float
    num_attempts: int = 0
    attempt: Attempt | None = None
    failed: dict[str, AttemptFailed] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    early: dict[int, int] = field(default_factory=dict)
    num_tokens_at_end: int | None = None
    end: End | None = None
    error: str = ""
    has_fallen_back: bool = False

    @property
    def expected(self) -> tuple[int, ...]:
        return answer(self.spec.prompt, self.spec.max_tokens, MAX_MODEL_LEN)


def failure(placement: Placement, is_prefill: bool, output: RequestOutput) -> AttemptFailed | RequestFailed:
    reason, kind = output.error or f"ended with {output.finish_reason}", output.error_kind
    if kind is ErrorKind.INVALID_REQUEST:
        return RequestFailed(reason)
    is_prompt_lost = kind is ErrorKind.KV_LOAD_FAILED or (is_prefill and kind is ErrorKind.INTERNAL)
    is_prefills_fault = (is_prefill or is_prompt_lost) and placement.prefill is not None
    worker = placement.prefill if is_prefills_fault and placement.prefill else placement.decode
    return AttemptFailed(worker, reason, is_prompt_lost=is_prompt_lost)
