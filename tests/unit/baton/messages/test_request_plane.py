"""Messages of the request plane: whose version they are of, and what cannot be one."""

import math
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from baton.errors import WireError
from baton.messages.request_plane import (
    REQUEST_PLANE_VERSION,
    TO_GATEWAY,
    TO_WORKER,
    AbortRequests,
    Hello,
    KVEvents,
    foreign_version,
)
from baton.messages.wire import Codec
from baton.worker import WorkerLoad
from tests.factories.observed_fleet import gateway_report


@pytest.mark.parametrize("kind", ["Hello", "Heartbeat"])
@pytest.mark.parametrize("rest", [[], ["incarnation", None, 0], ["fields", "of", "the", "future"]])
def test_another_version_is_recognized_in_any_message(kind: str, rest: list[object]) -> None:
    frame = msgpack.packb([kind, REQUEST_PLANE_VERSION + 1, *rest])
    codec = TO_WORKER if kind == "Hello" else TO_GATEWAY
    with pytest.raises(WireError):
        codec.decode(frame)
    assert foreign_version(frame) == REQUEST_PLANE_VERSION + 1


def test_a_message_of_another_version_with_the_same_fields_is_refused() -> None:
    kind, _, *fields = msgpack.unpackb(TO_WORKER.encode(Hello("incarnation", "g", 1, None, 0)))
    with pytest.raises(WireError, match="request plane version 99 does not match"):
        TO_WORKER.decode(msgpack.packb([kind, 99, *fields]))


def test_the_first_version_named_none() -> None:
    assert foreign_version(msgpack.packb(["Hello", "incarnation", None, 0])) == 1


@pytest.mark.parametrize(
    "frame",
    [
        TO_WORKER.encode(Hello("incarnation", "g", 1, None, 0)),
        TO_WORKER.encode(AbortRequests((), 1)),
        msgpack.packb(["Hello", REQUEST_PLANE_VERSION, "damaged"]),
        msgpack.packb(["Hello"]),
        msgpack.packb(7),
        b"\xc1",
    ],
)
def test_everything_else_is_of_no_other_version(frame: bytes) -> None:
    assert foreign_version(frame) is None


@pytest.mark.parametrize("parts", [[0, True, b"1234567", b""], [0, True, b"", b"123456789"]])
def test_half_a_hash_is_none(parts: list[object]) -> None:
    with pytest.raises(WireError, match="not a whole number of hashes"):
        TO_GATEWAY.decode(msgpack.packb(["KVEvents", *parts]))
    events = KVEvents(3, False, b"12345678", b"8765432112345678")
    assert TO_GATEWAY.decode(TO_GATEWAY.encode(events)) == events


@pytest.mark.parametrize("figure", [math.nan, math.inf, -0.5])
def test_a_load_that_no_worker_can_have_is_refused(figure: float) -> None:
    """A router or an autoscaler would compute with such a load, and a gateway would pass it on."""
    codec = Codec(WorkerLoad)
    for place, name in enumerate(("oldest_waiting_s", "prefill_tokens_per_s", "decode_step_s")):
        figures = [0.0, 0.0, 0.0]
        figures[place] = figure
        with pytest.raises(WireError, match=f"WorkerLoad: {name}: got {figure}"):
            codec.decode(msgpack.packb(["WorkerLoad", 0, *figures]))
    with pytest.raises(WireError, match="num_queued_prompt_tokens: got -1"):
        codec.decode(msgpack.packb(["WorkerLoad", -1, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("name", ["oldest_queued_s", "ttft_s", "itl_s"])
def test_a_gateways_report_has_only_possible_figures(name: str) -> None:
    calm = gateway_report()
    assert replace(calm, oldest_queued_s=1.0).oldest_queued_s == 1.0
    wrong: Any = math.nan if name == "oldest_queued_s" else (0.0, math.nan)
    with pytest.raises(WireError, match=f"{name}: got nan"):
        replace(calm, **{name: wrong})
