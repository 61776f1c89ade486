"""Requests that wait for their caller's share: neither the placement timeout nor a new worker concerns them."""

import pytest

from baton.errors import Overloaded, RequestError, WorkerUnavailable
from gateway.admission.queue import LOOK_AHEAD
from gateway.admission.shares import CallerShares, HeldBack
from gateway.requests.request_state import RequestState
from gateway.routing.placement import NoDecodeWorker, NoRoom
from tests.factories.queue_under_test import OVER_SHARE, QueueUnderTest, Request
from tests.factories.routing import POLICIES
from tests.unit.gateway.admission.test_shares import UnderTest


@pytest.mark.parametrize("over_share", [set(), {"x"}], ids=["", "the caller has lost its share since"])
def test_a_sweep_that_ends_early_takes_no_callers_patience_away(over_share: set[str]) -> None:
    queue = QueueUnderTest()
    queue.over_share = over_share
    queue.join(Request("x", caller="x", refusal=OVER_SHARE), 0.0, patience_s=30.0)
    queue.over_share = set()
    for number in range(LOOK_AHEAD):
        queue.join(Request(str(number), priority=-1), 1.0, patience_s=100.0)
    queue.make_room(0, 2.0)
    assert "x" not in queue.asked, "the sweep ended before it"
    for half_seconds in range(5, 121):
        assert queue.waiting.out_of_patience(half_seconds / 2) == []


def test_a_full_queue_names_the_share_that_a_request_waits_for() -> None:
    queue = QueueUnderTest(max_queued=0)
    queue.over_share = {"x"}
    with pytest.raises(Overloaded, match=f"0 requests wait already: {OVER_SHARE}"):
        queue.join(Request("x", caller="x", refusal=OVER_SHARE), 0.0)


@pytest.mark.parametrize(
    "refusal",
    [
        OVER_SHARE,
        HeldBack("every place is taken"),
        WorkerUnavailable("no prefill worker is available, but the request requires one"),
        WorkerUnavailable("suspects run one at a time"),
    ],
)
def test_only_those_that_wait_for_decode_room_are_reported_as_such(refusal: RequestError) -> None:
    queue = QueueUnderTest()
    for _ in range(LOOK_AHEAD + 2):
        queue.join(Request("held back", caller="x", refusal=refusal), 1.0)
    assert queue.waiting.oldest_since(for_worker=False) == 1.0
    assert queue.waiting.oldest_since(for_worker=True) is None, "nor do those count that no sweep came to"
    queue.join(Request("without room", priority=-1), 5.0)
    queue.join(Request("without room", priority=-1), 6.0)
    assert queue.waiting.oldest_since(for_worker=False) == 1.0
    assert queue.waiting.oldest_since(for_worker=True) == 5.0


def test_requests_without_any_decode_worker_wait_for_one_and_a_full_queue_tells_clients_of_it() -> None:
    queue = QueueUnderTest(max_queued=1)
    none = NoDecodeWorker("no decode worker is available")
    queue.join(Request("waits", refusal=none), 1.0)
    assert queue.waiting.oldest_since(for_worker=True) == 1.0
    with pytest.raises(WorkerUnavailable, match="no decode worker") as refused:
        queue.join(Request("too many", refusal=none), 2.0)
    assert type(refused.value) is WorkerUnavailable, "the name that clients and metrics know"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("key", [None, "a key"])
def test_c57_a_caller_that_holds_its_share_at_one_decode_worker_gets_another(
    policy: str, key: str | None
) -> None:
    """Each decode worker has 8 slots. A share is 7 of them."""
    under_test = UnderTest(slots=8, decodes="de", policy=policy)
    under_test.ask("b")
    under_test.end("b0")
    under_test.ask("a", 20, affinity_key=key)
    assert (under_test.held("a", "d"), under_test.held("a", "e")) == (7, 7)
    assert under_test.dispatcher.num_queued == 6
    under_test.ask("b")
    assert under_test.held("b") == 1
    under_test.wait(40.0)
    assert under_test.dispatcher.num_queued == 6, "the others wait for their caller's share"
    under_test.end("b21", "a1", "a2")
    assert under_test.held("a") == 14


def test_c57_a_large_request_at_one_decode_worker_keeps_no_small_ones_from_another() -> None:
    under_test = UnderTest(blocks=2_000, decodes="de")
    under_test.ask("b")
    under_test.end("b0")
    under_test.ask("a", prompt=1_900 * 16 - 1)
    (full,) = under_test.workers["a1"] - {"p"}
    under_test.answer("a1")
    under_test.ask("a", 20)
    assert under_test.held("a") == 21
    assert under_test.held("a", full) == 1


@pytest.mark.parametrize("places", [4, 5])
def test_requests_wait_for_their_callers_share_without_a_limit_also_while_every_place_is_taken(
    places: int,
) -> None:
    under_test = UnderTest(places=places)
    for caller in "abcd":
        under_test.ask(caller)
    under_test.ask("a")
    under_test.wait(40.0)
    assert under_test.dispatcher.num_queued == 1
    under_test.ask("e")
    assert under_test.held("e") == places - 4
    under_test.wait(40.0)
    assert under_test.dispatcher.num_queued == 1, "a newcomer without a place is refused, a waits"


def test_a_bug_in_refusing_a_request_of_a_caller_that_holds_its_share_ends_that_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_test = UnderTest(places=8)
    under_test.ask("a", 12)
    refusal, bugs = CallerShares.refusal, [ZeroDivisionError("a bug")]

    def fail_once(shares: CallerShares[RequestState], state: RequestState, now: float) -> NoRoom | None:
        if bugs and state.request.caller.name == "a":
            raise bugs.pop()
        return refusal(shares, state, now)

    monkeypatch.setattr(CallerShares, "refusal", fail_once)
    under_test.ask("b")
    assert bugs == []
    for _ in range(2):
        under_test.report()
        assert (under_test.held("a"), under_test.held("b"), under_test.dispatcher.num_queued) == (6, 1, 5)
