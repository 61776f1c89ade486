"""Requests that wait for a prefill worker: more decode workers would not help them."""

from gateway.admission.shares import HeldBack
from gateway.routing.placement import NoPrefillWorker
from tests.factories.queue_under_test import OVER_SHARE, QueueUnderTest, Request


def test_the_queue_knows_since_when_requests_wait_for_a_prefill_worker() -> None:
    """Such requests do not wait for room on a decode worker."""
    queue = QueueUnderTest()
    queue.join(Request("elsewhere", has_worker=False), 0.0)
    assert queue.waiting.oldest_without_prefill_since() is None
    needs_prefill = [Request(name, refusal=NoPrefillWorker("none is available")) for name in "ab"]
    for joins_at, request in enumerate(needs_prefill, start=1):
        queue.join(request, joins_at)
    assert queue.waiting.oldest_without_prefill_since() == 1.0
    assert queue.waiting.oldest_since(for_worker=True) is None
    needs_prefill[0].refusal = None
    queue.make_room(1, 3.0)
    assert (queue.placed, queue.waiting.oldest_without_prefill_since()) == (["a"], 2.0)


def test_what_an_earlier_sweep_met_does_not_count() -> None:
    """The latest sweep ended before it reached most of these requests."""
    queue = QueueUnderTest()
    waiting = [Request(f"r{index}", refusal=NoPrefillWorker("none is available")) for index in range(40)]
    for request in waiting:
        queue.join(request, 1.0)
    for request in waiting:
        request.refusal = HeldBack("every place is taken")
    queue.make_room(0, 60.0)
    assert queue.waiting.oldest_without_prefill_since() is None


def test_requests_of_a_caller_that_holds_its_share_by_now_wait_for_no_worker() -> None:
    queue = QueueUnderTest()
    waiting = [Request(f"r{index}") for index in range(8)]
    for request in waiting:
        queue.join(request, 1.0)
    assert queue.waiting.oldest_since(for_worker=True) == 1.0
    for request in waiting:
        request.refusal = OVER_SHARE
    queue.make_room(100, 60.0)
    assert queue.waiting.oldest_since(for_worker=True) is None
