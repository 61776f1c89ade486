"""The waiting queue: its order, whatever leaves it in between."""

import random

from scheduler.queue import WaitingQueue
from tests.factories.scheduling import make_request


def test_the_order_outlives_many_removals() -> None:
    queue, rng = WaitingQueue(), random.Random(0)
    requests = [make_request(1) for _ in range(300)]
    for request, key in zip(requests, rng.sample(range(300), 300), strict=True):
        request.queue_key = (key,)
        queue.push(request)
    for request in requests[:250]:
        assert queue.remove(request)
    left = sorted(requests[250:], key=lambda request: request.queue_key)
    assert queue.first_ids(50) == tuple(request.request_id for request in left)
    assert [queue.pop() for _ in range(50)] == left
    assert queue.peek() is None


def test_a_request_that_comes_back_with_another_key_has_only_its_new_place() -> None:
    queue = WaitingQueue()
    first, second = make_request(1), make_request(1)
    first.queue_key, second.queue_key = (1,), (2,)
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    first.queue_key = (3,)
    queue.push(first)
    assert queue.first_ids(3) == (second.request_id, first.request_id)
    assert [queue.pop(), queue.pop()] == [second, first]
