"""What the simulated gateway knows of a client's request."""

from dataclasses import dataclass, field
from enum import Enum
from zlib import crc32

from baton.request import RequestOutput
from gateway.requests.attempt import Attempt
from gateway.requests.journey import Journey
from gateway.requests.waiting import Seat
from tests.simulation.device import answer
from tests.simulation.scenario import MAX_MODEL_LEN, RequestSpec


class End(Enum):
    DONE = "done"
    ERROR = "error"
    LEFT = "left"


@dataclass(slots=True, eq=False)
class ClientRequest:
    """A client's request from its arrival to its one end."""

    spec: RequestSpec
    arrived_at: float
    journey: Journey
    attempt: Attempt | None = None
    seat: "Seat[ClientRequest] | None" = None
    tokens: list[int] = field(default_factory=list)
    early: dict[int, int] = field(default_factory=dict)
    num_tokens_at_end: int | None = None
    end: End | None = None
    error: str = ""

    @property
    def expected(self) -> tuple[int, ...]:
        return answer(self.spec.prompt, self.spec.max_tokens, MAX_MODEL_LEN)

    @property
    def priority(self) -> int:
        return self.spec.priority

    @property
    def is_resumed(self) -> bool:
        return self.journey.num_attempts > 0

    @property
    def caller(self) -> str:
        """One of three."""
        return str(crc32(self.spec.request_id.encode()) % 3)

    @property
    def num_tokens(self) -> int:
        return len(self.spec.prompt) + self.spec.max_tokens

    def time_left(self, now: float) -> float | None:
        timeout_s = self.spec.timeout_s
        return None if timeout_s is None else max(0.0, timeout_s - (now - self.arrived_at))

    def time_to_begin(self, now: float) -> float | None:
        return self.time_left(now)

    def needs(self) -> object:
        return self.journey.needs()

    def begin_attempt(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.early.clear()
        self.num_tokens_at_end = None


def brief(output: RequestOutput) -> str:
    """For the log."""
    reason = output.finish_reason.value if output.finish_reason else ""
    return f"{output.first_position} {list(output.token_ids)} {reason}"
