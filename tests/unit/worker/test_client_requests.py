"""The requests of each client, without a thread: whose they are, how they end, and their deadlines."""

import math
from dataclasses import replace
from typing import Any

import pytest

from baton.clock import VirtualClock
from baton.errors import InvalidRequest
from baton.kv import WorkerRef
from baton.request import FinishReason
from decode_worker import DecodeRole
from kv_transfer.commands import AbortLoad, BeginLoad
from tests.factories.engine import FakeBlockMover, make_core, make_engine_request
from tests.factories.hand_overs import both_ends
from worker.client_requests import ClientRequests

ROLE = DecodeRole(100)
PREFILL = WorkerRef("p0", "incarnation-1", ("tcp://127.0.0.1:1",), 16)
DECODE = WorkerRef("d0", "incarnation-2", ("tcp://127.0.0.1:2",), 16)


def test_an_id_in_use_is_refused_whichever_client_asks() -> None:
    requests = ClientRequests(make_core(), VirtualClock())
    requests.admit("a", make_engine_request("r"), ROLE)
    with pytest.raises(InvalidRequest, match="r is in use"):
        requests.admit("b", make_engine_request("r"), ROLE)
    assert (requests.of_client("a"), requests.of_client("b")) == (("r",), ())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_token_ids": ()}, "prompt"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"timeout_s": math.inf}, "timeout_s"),
        ({"timeout_s": 1e10}, "timeout_s"),
    ],
)
def test_what_only_a_faulty_gateway_sends_is_refused(fields: dict[str, Any], field: str) -> None:
    """Such a request would end the engine's loop, and with it the requests of every gateway."""
    requests = ClientRequests(make_core(), VirtualClock())
    with pytest.raises(InvalidRequest, match=field):
        requests.admit("a", replace(make_engine_request("r"), **fields), ROLE)
    assert not requests.request_ids
    assert requests.next_deadline() is None
    requests.admit("a", make_engine_request("r", timeout_s=1e8), ROLE)


def test_a_refusal_for_an_id_in_use_does_not_end_the_hand_over_of_the_request_that_uses_it() -> None:
    connector = FakeBlockMover()
    requests = ClientRequests(make_core(connector=connector), VirtualClock())
    _, loaded = both_ends(PREFILL, DECODE)
    request = make_engine_request("r", kv_transfer=loaded)
    requests.admit("a", request, ROLE)
    requests.decline(request)
    assert connector.commands == []
    requests.decline(make_engine_request("other", num_tokens=10, kv_transfer=loaded, output_token_ids=(7,)))
    begin, abort = connector.commands
    assert begin == BeginLoad("other", loaded, 11)
    assert isinstance(abort, AbortLoad)


def test_requests_end_in_the_order_of_the_call_and_only_for_their_own_client() -> None:
    requests = ClientRequests(make_core(), VirtualClock())
    for client_id, request_id in (("a", "1"), ("b", "2"), ("a", "3"), ("a", "4")):
        requests.admit(client_id, make_engine_request(request_id), ROLE)
    ended = requests.abort("a", ("4", "2", "unknown", "1"))
    assert [output.request_id for output in ended.pop("a")] == ["4", "1"]
    assert not ended
    assert [output.request_id for output in requests.abort_client("b")["b"]] == ["2"]


def test_a_request_is_kept_until_its_end_is_noted() -> None:
    requests = ClientRequests(make_core(), VirtualClock())
    requests.admit("a", make_engine_request("r", timeout_s=5.0), ROLE)
    ended = requests.abort_client("a")
    assert set(requests.request_ids) == {"r"}
    requests.forget_ended(ended["a"])
    assert not requests.request_ids
    assert requests.next_deadline() is None, "the deadlines of ended requests wake nothing"


def test_only_what_is_overdue_ends() -> None:
    clock = VirtualClock()
    requests = ClientRequests(make_core(clock=clock), clock)
    for request_id, timeout_s in (("late", 5.0), ("early", 1.0), ("never", None)):
        requests.admit("a", make_engine_request(request_id, timeout_s=timeout_s), ROLE)
    began = clock.now()
    assert requests.next_deadline() == began + 1.0
    assert requests.end_overdue() == {}
    clock.advance(1.0)
    (output,) = requests.end_overdue()["a"]
    assert (output.request_id, output.finish_reason) == ("early", FinishReason.ABORT)
    assert output.error == "the request's deadline passed"
    assert requests.next_deadline() == began + 5.0


def test_deadlines_of_ended_requests_do_not_pile_up_while_others_run() -> None:
    clock = VirtualClock()
    requests = ClientRequests(make_core(), clock)
    for timeout_s in (1.0, 3.0, 2.0, 4.0, 5.0, 2.5):
        requests.admit("a", make_engine_request(f"{timeout_s}", timeout_s=timeout_s), ROLE)
    requests.forget_ended(requests.abort("a", ["1.0"])["a"])
    for number in range(200):
        requests.admit("a", make_engine_request(str(number), timeout_s=86_400.0), ROLE)
        requests.forget_ended(requests.abort("a", [str(number)])["a"])
    assert len(requests._deadlines) < 100
    assert requests.next_deadline() == clock.now() + 2.0, "the earliest of those that run"
