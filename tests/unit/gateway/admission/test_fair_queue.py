"""FairQueue alone; tests/property/test_fair_queue.py has random requests."""

from gateway.admission.fair_queue import FairQueue, QueueEntry


def add(
    queue: FairQueue[None], caller: str, *, num_tokens: int = 10, priority: int = 0, is_resumed: bool = False
) -> QueueEntry[None]:
    entry: QueueEntry[None] = QueueEntry(
        item=None, caller=caller, num_tokens=num_tokens, priority=priority, is_resumed=is_resumed
    )
    queue.add(entry)
    return entry


def test_before_an_entry_come_more_urgent_ones_those_that_ran_its_callers_own_and_a_share_of_the_others() -> (
    None
):
    queue: FairQueue[None] = FairQueue()
    add(queue, "d", priority=-1, num_tokens=7)
    add(queue, "d", priority=1, num_tokens=1000)
    add(queue, "d", is_resumed=True, num_tokens=100)
    for caller in "aaabb":
        add(queue, caller)
    assert queue.num_tokens_before(add(queue, "b")) == 7 + 100 + 20 + 20
    assert queue.num_tokens_before(add(queue, "c")) == 7 + 100
    assert queue.num_tokens_before(add(queue, "b", is_resumed=True)) == 7 + 100


def test_a_caller_that_was_served_is_behind_new_ones_by_what_it_got() -> None:
    queue: FairQueue[None] = FairQueue()
    add(queue, "a")
    queue.serve(add(queue, "b", num_tokens=100))
    assert queue.num_tokens_before(add(queue, "a")) == 10
    assert queue.num_tokens_before(add(queue, "b")) == 20


def test_nothing_is_kept_of_callers_that_left_unserved() -> None:
    queue: FairQueue[None] = FairQueue()
    add(queue, "stays")
    for number in range(100):
        queue.remove(add(queue, f"caller {number}"))
    assert queue._levels[0].flows.keys() == {"stays"}


def test_a_callers_first_ones_are_those_of_priorities_at_which_it_waits() -> None:
    queue: FairQueue[None] = FairQueue()
    add(queue, "b")
    queue.serve(add(queue, "a"))
    waits = add(queue, "a", priority=1)
    assert list(queue.first_ones_of({"a"})) == [waits]
