"""SuspectTurns: a worker begins one suspect at a time, whichever gateway sent it; knows no socket and no clock.

Workers have ended under a suspect (gateway/admission/suspects.py). If two suspects ran together, the end of their
worker would not show which of them caused it. A gateway runs its own suspects one at a time, but does not know those of
other gateways. So a worker refuses suspects during the turn of another suspect. A turn ends when its suspect ends or
its answer grows, or after SUSPECT_TURN_S; then the suspect may still run.

In its heartbeats, the worker names the suspects whose turns have begun, and it sends heartbeats when a turn begins. The
suspect is held until its gateway says that it has read such a heartbeat. If the worker ends then, the gateway knows
whether the suspect ran alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.errors import Overloaded
from baton.request import SUSPECT_TURN_S, EngineRequest, RequestOutput
from worker.client_requests import refusal

RESERVED_S = 1.0
"""For this long after a turn, only the client that was refused first may begin. Otherwise, other clients might always
be faster."""


@dataclass(slots=True)
class _Turn:
    client_id: str
    held: EngineRequest | None
    """The suspect, until it runs."""
    ends_at: float
    num_tokens: int
    """The answer has grown when it has more tokens than this."""


class SuspectTurns:
    """The suspects whose turns have begun. The caller passes all times, in seconds."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}
        """By request. The turn that began last ends last."""
        self._next_client: str | None = None
        self._reserved_until = 0.0

    def running(self) -> tuple[str, ...]:
        """The suspects whose turns have begun here. They have not ended, and their answers have not grown."""
        return tuple(self._turns)

    def is_free(self, now: float) -> bool:
        """Whether it is no suspect's turn."""
        return all(turn.ends_at <= now for turn in self._turns.values())

    def begin(self, client_id: str, suspect: EngineRequest, now: float) -> RequestOutput | None:
        """Begins this suspect's turn, and holds it. Returns the refusal if it is another suspect's turn."""
        is_free, is_reserved = self.is_free(now), now < self._reserved_until
        if is_free and (not is_reserved or client_id == self._next_client):
            self._next_client, self._reserved_until = None, 0.0
            # One more token is no progress: in each attempt, the prefill worker brings one.
            num_tokens = len(suspect.output_token_ids) + 1
            self._turns[suspect.request_id] = _Turn(client_id, suspect, now + SUSPECT_TURN_S, num_tokens)
            return None
        if not is_reserved:
            self._next_client = client_id
            self._reserved_until = max(turn.ends_at for turn in self._turns.values()) + RESERVED_S
        return refusal(suspect.request_id, Overloaded("another suspect runs first", 1.0))

    def release(self, client_id: str, request_id: str) -> EngineRequest | None:
        """Call it when the client has read a heartbeat that names the suspect.

        Returns the suspect if it was held; it runs from now on.
        """
        turn = self._turns.get(request_id)
        if turn is None or turn.client_id != client_id:
            return None
        held, turn.held = turn.held, None
        return held

    def drop(self, client_id: str, request_ids: Iterable[str] | None, now: float) -> list[EngineRequest]:
        """Drops the client's held suspects with these ids, and ends their turns. Returns the dropped suspects.

        Without `request_ids`, drops all held suspects of this client. Suspects that run, and their turns, end with
        their last outputs, which the engine produces.
        """
        dropped = [
            turn.held
            for request_id, turn in self._turns.items()
            if turn.held is not None
            and turn.client_id == client_id
            and (request_ids is None or request_id in request_ids)
        ]
        for suspect in dropped:
            self.conclude(suspect.request_id, now)
        return dropped

    def conclude(self, request_id: str, now: float) -> None:
        """Ends the turn of a suspect that has ended, or whose answer has grown."""
        del self._turns[request_id]
        if self.is_free(now):
            self._reserved_until = min(self._reserved_until, now + RESERVED_S)

    def end_turns(self, outputs: Iterable[RequestOutput], now: float) -> bool:
        """Ends the turns of suspects that end, or whose answers grow, with these outputs. Returns whether any ended."""
        if not self._turns:
            return False
        ended = {output.request_id for output in outputs if self._ends_with(output)}
        for request_id in ended:
            self.conclude(request_id, now)
        return bool(ended)

    def _ends_with(self, output: RequestOutput) -> bool:
        if (turn := self._turns.get(output.request_id)) is None:
            return False
        num_tokens = output.first_position + len(output.token_ids)
        return output.finish_reason is not None or num_tokens > turn.num_tokens
