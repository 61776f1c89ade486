"""Requests that wait for a prefill worker: more decode workers would not help them."""

from gateway.routing.placement import NoPrefillWorker
from tests.unit.gateway.requests.test_queue import QueueUnderTest, Request


def test_the_queue_knows_since_when_requests_wait_for_a_prefill_worker() -> None:
    """That is no wait for room on a decode worker."""
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
