"""Behaviour 56 over real ZeroMQ: no suspect runs before its gateway knows that the worker names it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from baton.messages.request_plane import AbortRequests, Hello, RunSuspect, SubmitRequest
from baton.request import ErrorKind, FinishReason, RequestOutput
from tests.factories.request_plane import REQUEST, GatewaySocket, RecordingEngine, gateway_of, running_server
from worker.request_plane import RequestServer

SUSPECT = replace(REQUEST, is_suspect=True)
BYSTANDER = replace(REQUEST, request_id="bystander")


class Plane(NamedTuple):
    """A worker's request plane, whose first session is the other gateway's."""

    server: RequestServer
    engine: RecordingEngine
    gateway: GatewaySocket
    other: GatewaySocket


@pytest.fixture
def plane() -> Iterator[Plane]:
    engine = RecordingEngine()
    with (
        running_server(engine) as server,
        gateway_of(server, b"\x01other") as other,
        gateway_of(server) as gateway,
    ):
        for each, name in ((other, "g1"), (gateway, "g2")):
            each.send(Hello("incarnation-1", name, 1, None, 0))
            each.receive()
        yield Plane(server, engine, gateway, other)


def test_c56_a_suspect_runs_once_its_gateway_has_read_that_it_is_named(plane: Plane) -> None:
    plane.gateway.send(SubmitRequest(SUSPECT, 2))
    plane.gateway.wait_for_suspects("r")
    plane.other.wait_for_suspects("r")
    plane.gateway.send(SubmitRequest(BYSTANDER, 2))
    plane.other.send(RunSuspect("r", 1))
    plane.gateway.send(RunSuspect("r", 2))
    plane.gateway.send(RunSuspect("r", 2))
    plane.gateway.send(AbortRequests(("r",), 2))
    received = [plane.engine.received.get(timeout=60) for _ in range(3)]
    client_id = plane.gateway.client_id
    assert received == [
        ("submit", client_id, BYSTANDER),
        ("submit", client_id, SUSPECT),
        ("abort", client_id, ("r",)),
    ]


def test_c56_another_gateways_suspect_is_refused_until_the_turn_ends(plane: Plane) -> None:
    plane.gateway.send(SubmitRequest(SUSPECT, 2))
    plane.other.wait_for_suspects("r")
    plane.other.send(SubmitRequest(replace(SUSPECT, request_id="s"), 1))
    (refused,) = plane.other.receive_outputs().outputs
    assert (refused.request_id, refused.error_kind) == ("s", ErrorKind.OVERLOADED)
    assert plane.engine.received.get(timeout=60) == ("decline", "", replace(SUSPECT, request_id="s"))
    plane.gateway.send(RunSuspect("r", 2))
    end = RequestOutput(request_id="r", first_position=0, finish_reason=FinishReason.STOP)
    plane.server.send(plane.gateway.client_id, [end])
    plane.other.wait_for_suspects()


def test_c56_a_turn_ends_when_its_held_suspect_is_aborted(plane: Plane) -> None:
    plane.gateway.send(SubmitRequest(SUSPECT, 2))
    plane.other.wait_for_suspects("r")
    plane.gateway.send(AbortRequests(("r",), 2))
    plane.other.wait_for_suspects()
    plane.gateway.send(RunSuspect("r", 2))
    plane.gateway.send(SubmitRequest(BYSTANDER, 2))
    received = [plane.engine.received.get(timeout=60) for _ in range(3)]
    client_id = plane.gateway.client_id
    declined = ("decline", "", SUSPECT)
    assert received == [declined, ("abort", client_id, ("r",)), ("submit", client_id, BYSTANDER)]


def test_c51_a_held_suspect_ends_when_it_is_aborted(plane: Plane) -> None:
    """Its gateway may wait for this end: the decode worker has reported that the prompt did not arrive."""
    plane.gateway.send(SubmitRequest(replace(SUSPECT, output_token_ids=(7, 8)), 2))
    plane.gateway.wait_for_suspects("r")
    plane.gateway.send(AbortRequests(("r",), 2))
    end = RequestOutput(request_id="r", first_position=2, finish_reason=FinishReason.ABORT)
    assert plane.gateway.receive_outputs().outputs == (end,)


def test_c56_a_turn_ends_when_the_gateway_of_its_held_suspect_leaves(plane: Plane) -> None:
    plane.gateway.send(SubmitRequest(SUSPECT, 2))
    plane.other.wait_for_suspects("r")
    plane.gateway.socket.close()
    plane.other.wait_for_suspects()
    received = [plane.engine.received.get(timeout=60) for _ in range(2)]
    assert sorted(received) == [("abort_client", plane.gateway.client_id), ("decline", "", SUSPECT)]
