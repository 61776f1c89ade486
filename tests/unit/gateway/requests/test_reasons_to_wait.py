"""The error of a request that found no place in time says what it waited for last."""

from baton.errors import WorkerUnavailable
from baton.request import ErrorKind, FinishReason, RequestOutput
from gateway.requests.events import Refuse, Submitted, Tick, WorkerOutputs
from tests.factories.dispatching import killed, make_dispatcher, make_request, submitted


def test_a_request_whose_full_worker_died_waits_for_a_worker_and_no_longer_for_room() -> None:
    dispatcher, request = make_dispatcher("p0", "d0"), make_request()
    placed = submitted(dispatcher.handle(Submitted(request), 0.0))
    full = RequestOutput(
        request_id=placed["d0"],
        first_position=0,
        finish_reason=FinishReason.ERROR,
        error="it is full",
        error_kind=ErrorKind.OVERLOADED,
    )
    dispatcher.handle(WorkerOutputs("d0", (full,)), 0.1)
    assert dispatcher.num_queued == 1
    dispatcher.handle(killed("d0"), 0.2)
    effects = [effect for second in range(1, 60) for effect in dispatcher.handle(Tick(), second)]
    ((error),) = [effect.error for effect in effects if isinstance(effect, Refuse)]
    assert isinstance(error, WorkerUnavailable)
    assert "no decode worker is available" in str(error)
