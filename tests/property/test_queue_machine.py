"""WaitingQueue and its orders against a sorted list."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.config import SchedulerConfig
from scheduler import Request
from scheduler.order import make_order
from scheduler.queue import WaitingQueue
from tests.factories.scheduling import make_request


class QueueMachine(RuleBasedStateMachine):
    """Requests come, are served, are set aside and put back, return after a preemption, and leave from the middle."""

    @initialize(policy=st.sampled_from(["fcfs", "priority"]), ageing_s=st.sampled_from([0.0, 3.0]))
    def build(self, policy: str, ageing_s: float) -> None:
        is_fcfs = policy == "fcfs"
        config = SchedulerConfig(policy=policy, priority_ageing_s=0.0 if is_fcfs else ageing_s)  # type: ignore[arg-type]
        self.is_fcfs, self.ageing_s = is_fcfs, ageing_s
        self.order = make_order(config)
        self.queue = WaitingQueue()
        self.waiting: list[Request] = []
        """In FCFS, the order itself; under priority, only the members."""
        self.running: list[Request] = []
        self.num_requests = 0

    @rule(priority=st.integers(0, 3), delay_s=st.sampled_from([0.0, 1.0, 5.0]))
    def add(self, priority: int, delay_s: float) -> None:
        self.num_requests += 1
        request = make_request(
            request_id=f"r{self.num_requests % 7}-{self.num_requests}",
            priority=priority,
            arrival_time=self.num_requests + delay_s,
        )
        request.queue_key = self.order.key_of_new(request)
        self.queue.push(request)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def serve(self) -> None:
        request = self.queue.pop()
        assert request is self.first()
        self.waiting.remove(request)
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_way(self, data: st.DataObject) -> None:
        victim = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        victim.queue_key = self.order.key_of_returning(victim)
        self.queue.push(victim)
        self.waiting.insert(0, victim)

    @precondition(lambda self: self.waiting)
    @rule(num_passed_over=st.integers(1, 3))
    def pass_over(self, num_passed_over: int) -> None:
        """Some requests are taken and put back: each request keeps its place."""
        taken = [self.queue.pop() for _ in range(min(num_passed_over, len(self.waiting)))]
        for request in taken:
            self.queue.push(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), is_repeated=st.booleans())
    def leave(self, data: st.DataObject, is_repeated: bool) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove(request)
        self.waiting.remove(request)
        if is_repeated:
            assert not self.queue.remove(request)

    @invariant()
    def the_first_is_the_first(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert self.queue.peek() is self.first()
        assert self.queue.first_ids(3) == tuple(request.request_id for request in self.in_order()[:3])

    def first(self) -> Request | None:
        return next(iter(self.in_order()), None)

    def in_order(self) -> list[Request]:
        if self.is_fcfs:
            return self.waiting
        return sorted(self.waiting, key=self.rank)

    def rank(self, request: Request) -> tuple[float, float, str]:
        age_bonus = request.arrival_time / self.ageing_s if self.ageing_s else 0.0
        return request.priority + age_bonus, request.arrival_time, request.request_id


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_requests_that_leave_take_their_entries_along_and_the_others_keep_their_places() -> None:
    queue, requests = WaitingQueue(), [make_request() for _ in range(1_000)]
    for number, request in enumerate(requests):
        request.queue_key = (number * 37 % 1_000,)
        queue.push(request)
    for request in requests[10:]:
        assert queue.remove(request)
    assert len(queue._heap) < 100
    assert [queue.pop() for _ in range(10)] == sorted(requests[:10], key=lambda request: request.queue_key)
