"""SuspectTurn: a worker runs the suspects of one gateway at a time; pure.

Workers have ended under a suspect (gateway/requests/suspects.py). If two suspects ran together, the end of their
worker would be evidence against neither. A gateway runs its own suspects one at a time, but does not know those of
other gateways. So a worker refuses a suspect while it is the turn of another gateway's suspect. The worker names the
suspect whose turn it is in its heartbeats, and sends heartbeats before the suspect runs. If the worker ends then, the
gateway knows that no other suspect ran.
"""

from collections.abc import Iterable

from baton.errors import Overloaded
from baton.request import SUSPECT_TURN_S, EngineRequest, RequestOutput
from worker.client_requests import refusal


class SuspectTurn:
    """Whose turn it is. The caller passes all times, in seconds."""

    def __init__(self) -> None:
        self._client_id = ""
        self._request_id: str | None = None
        self._ends_at = 0.0
        self._progress_at = 0
        """The turn ends when the answer has more tokens than this."""

    def current(self, now: float) -> str | None:
        """The suspect whose turn it is."""
        return self._request_id if now < self._ends_at else None

    def begin(self, client_id: str, suspect: EngineRequest, now: float) -> RequestOutput | None:
        """Begins this suspect's turn. Returns the refusal if it is the turn of another gateway's suspect.

        The gateway's own former suspect has left the turn to this one: its abort may still be under way.
        """
        if self.current(now) is not None and client_id != self._client_id:
            return refusal(
                suspect.request_id,
                Overloaded("workers ended under it, and another such request is tried first", 1.0),
            )
        self._client_id = client_id
        self._request_id, self._ends_at = suspect.request_id, now + SUSPECT_TURN_S
        # One more token is no progress: in each attempt, the prefill worker brings one.
        self._progress_at = len(suspect.output_token_ids) + 1
        return None

    def note(self, outputs: Iterable[RequestOutput]) -> bool:
        """Ends the turn if the suspect has ended, or if its answer has grown. Returns True if the turn is over."""
        if self._request_id is None:
            return False
        for output in outputs:
            num_tokens = output.first_position + len(output.token_ids)
            has_left = output.finish_reason is not None or num_tokens > self._progress_at
            if output.request_id == self._request_id and has_left:
                self._request_id = None
                return True
        return False
