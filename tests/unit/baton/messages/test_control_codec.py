"""Control calls and their replies as frames: values, errors, other versions and sizes."""

from typing import Any

import msgpack
import pytest

from baton.errors import (
    BatonError,
    ClusterError,
    ConfigError,
    FleetEnded,
    FleetError,
    ModelError,
    OtherFleetVersion,
    TraceError,
    UnknownWorker,
    WireError,
)
from baton.fleet import FleetDescription, FleetView
from baton.messages import control
from baton.messages.control import (
    CONTROL_PLANE_VERSION,
    WORKER_CALLS,
    CallFailure,
    ControlRequest,
    DescribeFleet,
    Done,
    Drain,
    Drained,
    DrainNode,
    WaitRolloutStep,
    WaitView,
    answer_type,
)
from baton.messages.control_codec import (
    MAX_MESSAGE_BYTES,
    ControlCodec,
    FailureFrame,
    failure,
    read_call,
    read_reply,
    write_call,
)
from cluster.control_api.calls import CALLS

CODEC = ControlCodec((WaitView, DescribeFleet, *WORKER_CALLS))


def test_a_request_and_its_answer_cross_as_they_were() -> None:
    request = WaitView("c", 3, 5.0)
    call = read_call(write_call(CODEC.frame(7, 1.0, request)))
    assert (call.number, call.timeout_s, CODEC.request_in(call)) == (7, 1.0, request)
    view = FleetView("c-incarnation", 4, (), (("gone", "killed"),))
    reply = read_reply(CODEC.answer(7, request, view))
    assert (reply.number, CODEC.value_in(reply, request)) == (7, view)


def test_every_call_is_one_of_a_controller_or_of_a_worker() -> None:
    """Carriers send only these."""
    defined = {
        kind
        for kind in vars(control).values()
        if isinstance(kind, type) and issubclass(kind, ControlRequest) and kind is not ControlRequest
    }
    assert defined == {*CALLS, *WORKER_CALLS}


def test_a_request_names_its_answers_type() -> None:
    assert (answer_type(WaitView), answer_type(Drain)) == (FleetView, Drained)


@pytest.mark.parametrize(
    ("raised", "arrives"),
    [
        (FleetEnded("over"), FleetEnded),
        (OtherFleetVersion("99"), OtherFleetVersion),
        (ClusterError("away"), ClusterError),
        (FleetError("no"), FleetError),
        (UnknownWorker("who?"), UnknownWorker),
        (ConfigError("what?"), ConfigError),
        (ModelError("no config.json"), ModelError),
        (TraceError("odd"), ClusterError),
    ],
)
def test_errors_cross_with_their_type_and_words(raised: BatonError, arrives: type[BatonError]) -> None:
    reply = read_reply(failure(1, raised))
    assert reply.number == 1
    with pytest.raises(BatonError) as caught:
        CODEC.value_in(reply, DescribeFleet())
    assert (type(caught.value), str(caught.value)) == (arrives, str(raised))


def test_an_error_of_a_type_that_is_unknown_here_arrives_all_the_same() -> None:
    assert type(CallFailure("OfNextYear", "no").to_error()) is ClusterError


def test_an_error_may_hold_any_text() -> None:
    reply = read_reply(failure(1, FleetError("a path \udcff" + "x" * 10_000)))
    assert isinstance(reply, FailureFrame)
    assert reply.failure.reason.startswith("a path ?x")
    assert len(reply.failure.reason) < 5000


def test_another_version_is_named_on_either_side() -> None:
    failed = msgpack.unpackb(failure(5, FleetError("no")))[3]
    for field in ({"of": "another kind"}, failed):
        theirs = read_reply(msgpack.packb(["Refusal", 99, 5, field]))
        assert theirs.number == 5
        with pytest.raises(OtherFleetVersion, match="version 99 of the control plane"):
            CODEC.value_in(theirs, DescribeFleet())
    with pytest.raises(WireError):
        read_reply(msgpack.packb(["Answer", 99, 5, b""]))


def test_ends_of_every_version_read_the_first_fields_of_these() -> None:
    """These frames cannot change: with them, two versions tell each other why they do not work together."""
    call = msgpack.unpackb(write_call(CODEC.frame(4, 1.0, DescribeFleet())))
    assert call[:3] == ["Call", CONTROL_PLANE_VERSION, 4]
    assert msgpack.unpackb(failure(4, FleetError("no")))[:3] == ["Refusal", CONTROL_PLANE_VERSION, 4]


def test_an_answer_that_is_too_large_is_an_error_and_no_silence() -> None:
    huge = FleetDescription(replicas=(), nodes=(), controller_incarnation="x" * MAX_MESSAGE_BYTES)
    reply = read_reply(CODEC.answer(1, DescribeFleet(), huge))
    with pytest.raises(ClusterError, match="cannot be sent"):
        CODEC.value_in(reply, DescribeFleet())


def test_an_answer_to_another_call_cannot_be_read() -> None:
    reply = read_reply(CODEC.answer(1, Drain(1.0), Drained(is_clean=True)))
    with pytest.raises(ClusterError, match="the answer to DescribeFleet cannot be read"):
        CODEC.value_in(reply, DescribeFleet())


@pytest.mark.parametrize(
    "make",
    [
        lambda: WaitView("", 0, -1.0),
        lambda: WaitView("", 0, float("inf")),
        lambda: WaitRolloutStep("r", -1),
        lambda: DrainNode("n", float("nan")),
        lambda: Drain(-0.5),
    ],
)
def test_impossible_requests_cannot_be_made(make: Any) -> None:
    with pytest.raises(WireError):
        make()


def test_whatever_a_frame_holds_has_a_reply() -> None:
    def run(request: ControlRequest[Any]) -> object:
        if request == Drain(0.0):
            raise FleetError("not now")
        return Drained(is_clean=True) if isinstance(request, Drain) else Done()

    def reply_to(frame: bytes) -> tuple[int, str]:
        reply = read_reply(CODEC.carry_out(frame, run))
        return reply.number, reply.failure.reason if isinstance(reply, FailureFrame) else "answered"

    assert reply_to(write_call(CODEC.frame(3, 0.0, Drain(1.0)))) == (3, "answered")
    assert reply_to(write_call(CODEC.frame(4, 0.0, Drain(0.0)))) == (4, "not now")
    unknown = msgpack.packb(["Call", CONTROL_PLANE_VERSION, 5, 0.0, msgpack.packb(["Dance"])])
    assert reply_to(unknown) == (5, "unknown message kind 'Dance'")
    number, reason = reply_to(b"\xc1")
    assert (number, reason.startswith("not msgpack")) == (0, True)
