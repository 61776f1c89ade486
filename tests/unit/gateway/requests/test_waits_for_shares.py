"""Requests that wait for their caller's share: neither the placement timeout nor a new worker concerns them."""

from gateway.requests.queue import LOOK_AHEAD
from tests.unit.gateway.requests.test_queue import QueueUnderTest, Request


def test_a_sweep_that_ends_early_takes_no_callers_patience_away() -> None:
    queue = QueueUnderTest()
    queue.join(Request("x", caller="x", is_over_share=True), 0.0, patience_s=30.0)
    for number in range(LOOK_AHEAD):
        queue.join(Request(str(number), priority=-1), 1.0, patience_s=100.0)
    queue.make_room(0, 2.0)
    assert "x" not in queue.asked, "the sweep ended before it"
    now = 2.0
    while now < 60.0:
        now += 0.5
        assert queue.waiting.out_of_patience(now) == []


def test_only_those_that_wait_for_a_worker_are_reported_as_such() -> None:
    queue = QueueUnderTest()
    queue.join(Request("held back", caller="x", is_over_share=True), 1.0)
    assert queue.waiting.oldest_since(for_worker=False) == 1.0
    assert queue.waiting.oldest_since(for_worker=True) is None
    queue.join(Request("without room"), 5.0)
    assert queue.waiting.oldest_since(for_worker=False) == 1.0
    assert queue.waiting.oldest_since(for_worker=True) == 5.0
