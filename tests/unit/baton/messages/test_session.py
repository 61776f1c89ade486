"""Both ends of a session on the request plane, over a line that loses the messages that a test chooses."""

from dataclasses import replace

import pytest

from baton.errors import WireError
from baton.kv import WorkerRef
from baton.messages.request_plane import Heartbeat, RunSuspect
from baton.messages.session import GatewaySession, WorkerSessions
from baton.request import EngineRequest
from baton.sampling import SamplingParams
from baton.worker import KVBlockCounts, RequestCounts, WorkerRole, WorkerState, WorkerStatus

GATEWAY, LATEST, OTHER = b"gateway", b"latest", b"other"
REQUEST = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling_params=SamplingParams())
STATUS = WorkerStatus(
    WorkerRef("d0", "incarnation", ("tcp://127.0.0.1:1",), 16),
    WorkerRole.DECODE,
    WorkerState.READY,
    KVBlockCounts(9, 9, 0, 0),
    RequestCounts(0, 0, 0),
    {},
)


class Line:
    """A gateway and a worker that have said hello to each other."""

    def __init__(self) -> None:
        self.gateway, self.worker = GatewaySession("incarnation", "g", 1), WorkerSessions("incarnation")
        assert self.greet() == (None, None)

    def greet(self, now: float = 0.0) -> tuple[str | None, str | None]:
        """Sends one Hello and its answer. Returns what the worker misses, and what the gateway finds lost."""
        ended = self.worker.on_hello(GATEWAY, self.gateway.hello(), now)
        gap = None if ended is None else ended.reason
        return gap, self.gateway.note_heartbeat(self.worker.heartbeat(GATEWAY, STATUS))

    def submit(self, *, is_lost: bool = False) -> None:
        order = self.gateway.submit(REQUEST)
        self.gateway.count_command()
        if not is_lost:
            self.worker.count_command(GATEWAY, order)

    def output(self, *, is_lost: bool = False) -> None:
        assert self.worker.count_outputs(GATEWAY)
        if not is_lost:
            self.gateway.note_outputs()


def test_a_session_continues_while_everything_arrives() -> None:
    line = Line()
    for _ in range(3):
        line.submit()
        line.output()
        assert line.greet() == (None, None)


def test_a_lost_command_ends_the_session_on_both_ends_once() -> None:
    line = Line()
    line.submit()
    line.submit(is_lost=True)
    gap, loss = line.greet()
    assert gap == "1 of 2 commands arrived"
    assert loss == "it had lost this gateway and ended its requests"
    line.submit()
    assert line.greet() == (None, None)


def test_a_lost_output_is_missed_once() -> None:
    line = Line()
    line.output()
    line.output(is_lost=True)
    assert line.greet() == (None, "1 of its messages did not arrive")
    line.output()
    assert line.greet() == (None, None)


def test_a_gateway_learns_that_it_was_forgotten() -> None:
    line = Line()
    line.submit()
    assert line.worker.end(GATEWAY)
    assert not line.worker.end(GATEWAY)
    assert not line.worker.count_outputs(GATEWAY), "no gateway is connected"
    assert line.greet() == (None, "it had lost this gateway and ended its requests")


def test_commands_of_an_ended_session_are_refused_and_not_counted() -> None:
    line = Line()
    line.worker.end(GATEWAY)
    with pytest.raises(WireError, match="SubmitRequest on a connection without a session"):
        line.submit()
    line.worker.on_hello(GATEWAY, line.gateway.hello(), 0.0)
    with pytest.raises(WireError, match="SubmitRequest belongs to session 1, but the current session is 2"):
        line.submit()
    assert line.greet()[1] is not None
    line.submit()
    assert line.greet() == (None, None)


def test_a_gateway_that_connects_anew_ends_the_session_of_its_former_connection() -> None:
    """The worker may not yet know that the former connection is closed, and would answer on it."""
    line = Line()
    line.submit()
    latest = GatewaySession("incarnation", "g", 2)
    assert line.worker.on_hello(LATEST, latest.hello(), 0.0) == (GATEWAY, "the gateway has connected anew")
    assert line.worker.peers == [LATEST]
    assert not line.worker.count_outputs(GATEWAY)
    assert latest.note_heartbeat(line.worker.heartbeat(LATEST, STATUS)) is None
    line.worker.count_command(LATEST, latest.submit(REQUEST))
    latest.count_command()
    assert line.worker.on_hello(LATEST, latest.hello(), 0.0) is None


def test_a_hello_that_comes_after_its_connection_was_closed_changes_nothing() -> None:
    line = Line()
    late, latest = line.gateway.hello(), GatewaySession("incarnation", "g", 2)
    line.worker.on_hello(LATEST, latest.hello(), 0.0)
    assert line.worker.on_hello(GATEWAY, late, 0.0) is None
    assert line.worker.peers == [LATEST]


def test_hellos_on_their_way_when_the_first_answer_comes_change_nothing() -> None:
    worker, gateway = WorkerSessions("incarnation"), GatewaySession("incarnation", "g", 1)
    early = [gateway.hello() for _ in range(2)]
    assert [worker.on_hello(GATEWAY, hello, 0.0) for hello in early] == [None, None]
    assert gateway.note_heartbeat(worker.heartbeat(GATEWAY, STATUS)) is None
    assert worker.heartbeat(GATEWAY, STATUS) == Heartbeat(STATUS, 1, 0)


def test_silence_is_each_gateways_own() -> None:
    line = Line()
    line.worker.on_hello(OTHER, GatewaySession("incarnation", "other", 1).hello(), 5.0)
    assert line.worker.silent_for(3.0, now=6.0) == [GATEWAY]
    line.greet(now=6.0)
    assert line.worker.silent_for(3.0, now=6.0) == []


def test_a_hello_for_another_incarnation_opens_no_session() -> None:
    worker = WorkerSessions("incarnation")
    worker.on_hello(GATEWAY, GatewaySession("an older incarnation", "g", 1).hello(), 0.0)
    assert worker.peers == []
    assert worker.heartbeat(GATEWAY, STATUS) == Heartbeat(STATUS, None, 0)


def test_c56_a_suspect_is_run_once_when_a_status_first_names_it() -> None:
    line, suspect = Line(), replace(REQUEST, is_suspect=True)
    line.submit()
    line.gateway.submit(suspect)
    line.gateway.submit(replace(suspect, request_id="s"))
    assert line.gateway.run_named(STATUS) == []
    naming = replace(STATUS, suspects=("another gateway's", "r"))
    assert line.gateway.run_named(naming) == [RunSuspect("r", line.gateway.number)]
    assert line.gateway.run_named(naming) == []
    line.gateway.abort(("s",))
    assert line.gateway.run_named(replace(STATUS, suspects=("s",))) == []


def test_c56_no_suspect_of_a_lost_session_is_run() -> None:
    line = Line()
    line.gateway.submit(replace(REQUEST, is_suspect=True))
    line.gateway.note_heartbeat(Heartbeat(STATUS, 2, 0))
    assert line.gateway.run_named(replace(STATUS, suspects=("r",))) == []
