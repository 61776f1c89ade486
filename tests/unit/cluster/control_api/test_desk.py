"""Both ends of a call to a fleet's door, without sockets: what is taken, what is refused, and how errors cross."""

from pathlib import Path

import msgpack
import pytest

from baton.config import BatonConfig
from baton.errors import (
    BatonError,
    ClusterError,
    ConfigError,
    FleetEnded,
    FleetError,
    UnknownWorker,
    WireError,
)
from baton.fleet import FleetDescription, FleetView
from cluster.control_api import desk as module
from cluster.control_api.desk import Desk, pack_configuration, read_reply, unpack_configuration
from cluster.control_api.messages import (
    FROM_DOOR,
    MAX_MESSAGE_BYTES,
    TO_DOOR,
    Call,
    Describe,
    Done,
    Drain,
    FleetConfiguration,
    NextStep,
    NextView,
    Refusal,
    RefusalKind,
)

PEER, OTHER = b"peer", b"other"


def frame(number: int = 1, timeout_s: float = 1.0) -> bytes:
    return TO_DOOR.encode(Call(number, timeout_s, Describe()))


def refusal(reply: Call | bytes | None) -> BatonError:
    assert isinstance(reply, bytes)
    _, error = read_reply(reply)
    assert isinstance(error, BatonError)
    return error


def test_a_call_is_answered_by_its_number() -> None:
    desk = Desk()
    call = desk.take(PEER, [frame(7)])
    assert call == Call(7, 1.0, Describe())
    view = FleetView("c-life", 3, (), (("gone", "killed"),))
    assert read_reply(desk.answer(PEER, 7, view)) == (7, view)
    assert desk.num_open == 0


@pytest.mark.parametrize(
    ("raised", "arrives"),
    [
        (FleetEnded("over"), FleetEnded),
        (ClusterError("away"), ClusterError),
        (FleetError("no"), FleetError),
        (UnknownWorker("who?"), FleetError),
        (ConfigError("what?"), ClusterError),
    ],
)
def test_errors_cross_with_their_type_and_words(raised: BatonError, arrives: type[BatonError]) -> None:
    desk = Desk()
    desk.take(PEER, [frame()])
    number, error = read_reply(desk.refuse(PEER, 1, raised))
    assert (number, type(error), str(error)) == (1, arrives, str(raised))


def test_an_error_may_hold_any_text() -> None:
    desk = Desk()
    desk.take(PEER, [frame()])
    _, error = read_reply(desk.refuse(PEER, 1, FleetError("a path \udcff" + "x" * 10_000)))
    assert str(error).startswith("a path ?x")
    assert len(str(error)) < 5000


def test_one_connection_has_so_many_calls_and_others_have_theirs() -> None:
    desk = Desk()
    for number in range(module.MAX_CALLS_OF_ONE):
        assert isinstance(desk.take(PEER, [frame(number)]), Call)
    assert "too many calls" in str(refusal(desk.take(PEER, [frame(1000)])))
    assert isinstance(desk.take(OTHER, [frame(1)]), Call)
    desk.answer(PEER, 0, Done())
    assert isinstance(desk.take(PEER, [frame(1001)]), Call)


def test_all_connections_together_have_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CALLS", 2)
    desk = Desk()
    assert isinstance(desk.take(b"a", [frame()]), Call)
    assert isinstance(desk.take(b"b", [frame()]), Call)
    refusal(desk.take(b"c", [frame()]))
    assert desk.num_open == 2


def test_a_number_that_is_under_way_is_no_second_call() -> None:
    desk = Desk()
    desk.take(PEER, [frame()])
    assert desk.take(PEER, [frame()]) is None
    assert (desk.num_bad_messages, desk.num_open) == (1, 1)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x00"],
        [frame(), frame()],
        [msgpack.packb(["Describe"])],
        [msgpack.packb(["Call", 1, 1, 0.0, ["Describe"]])],
        [msgpack.packb(["Call", 1, 1, float("nan"), ["Describe"]])],
        [msgpack.packb(["Call", 1, 1, 1.0, ["Configuration"]])],
        [b"x" * (MAX_MESSAGE_BYTES + 1)],
    ],
)
def test_what_is_no_call_is_counted_and_nothing_else(frames: list[bytes]) -> None:
    desk = Desk()
    assert desk.take(PEER, frames) is None
    assert (desk.num_bad_messages, desk.num_open) == (1, 0)


def test_impossible_questions_cannot_be_asked() -> None:
    for question in (
        lambda: NextView("", 0, -1.0),
        lambda: NextView("", 0, float("inf")),
        lambda: NextStep("r", -1),
    ):
        with pytest.raises(WireError):
            question()


def test_another_version_is_named_on_either_side() -> None:
    theirs = msgpack.packb(["Call", 99, 5, "whatever they do there"])
    error = refusal(Desk().take(PEER, [theirs]))
    assert "version 99 of the fleet plane" in str(error)
    number, error_there = read_reply(msgpack.packb(["Refusal", 99, 5, {"of": "another kind"}]))
    assert number == 5
    assert "version 99" in str(error_there)
    with pytest.raises(WireError):
        read_reply(msgpack.packb(["Answer", 99, 5]))


def test_an_answer_that_is_too_large_is_an_error_and_no_silence() -> None:
    desk = Desk()
    desk.take(PEER, [frame()])
    huge = FleetDescription(slots=(), nodes=(), controller_incarnation="x" * MAX_MESSAGE_BYTES)
    assert "cannot be sent" in str(refusal(desk.answer(PEER, 1, huge)))


def test_a_refusal_says_who_it_is_for() -> None:
    assert FROM_DOOR.decode(FROM_DOOR.encode(Refusal(4, RefusalKind.FLEET_ERROR, "no"))) == Refusal(
        4, RefusalKind.FLEET_ERROR, "no"
    )
    assert TO_DOOR.decode(TO_DOOR.encode(Call(4, 1.0, Drain("w1")))).question == Drain("w1")


def test_the_configuration_crosses_as_it_was_set_without_what_is_each_process_own() -> None:
    config = BatonConfig.from_mapping(
        {
            "model": {"path": "/models/tiny"},
            "network": {"bind_host": "0.0.0.0"},
            "cluster": {"name": "blue", "ray_address": "auto", "prefill_labels": {"role": "prefill"}},
            "gateway": {"max_in_flight": 3, "api_keys_file": "/secret"},
            "logging": {"level": "debug"},
        }
    )
    packed = pack_configuration(config, Path("/models/tiny"))
    assert "secret" not in packed.sections
    crossed, path = unpack_configuration(packed)
    assert path == Path("/models/tiny")
    assert crossed == config.model_copy(
        update={"gateway": BatonConfig().gateway, "logging": BatonConfig().logging}
    )
    assert crossed.model.model_fields_set == {"path"}


@pytest.mark.parametrize("sections", ["{", "[]", '{"cluster": {"flavour": 1}}'])
def test_a_configuration_that_cannot_be_read_says_so(sections: str) -> None:
    with pytest.raises(ConfigError, match="the fleet's configuration"):
        unpack_configuration(FleetConfiguration(sections, "/m"))
