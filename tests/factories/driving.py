"""Driver: steps a scheduler over a fake runner as the engine does; several steps may be under way."""

from collections import deque
from collections.abc import Callable, Iterable

from baton.request import FinishReason, RequestOutput
from baton.step import SchedulerOutput
from scheduler import Request, Scheduler
from tests.factories.scheduling import FakeConnector, FakeRunner, assert_at_rest, flatten


class Driver:
    """Checks positions, ends and every invariant of the scheduler after each step.

    It plans `num_ahead` steps before it computes the oldest step, as late as a slow device would.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: FakeRunner | None = None,
        num_ahead: int = 0,
        connector: FakeConnector | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.connector = connector
        if connector is not None:
            connector.starts_late = True
        self.runner = runner or FakeRunner()
        self.num_ahead = num_ahead
        self.under_way: deque[SchedulerOutput] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.finished_in_plans: list[str] = []
        """All ids that plans told the runner to forget."""
        self.has_failed = False
        """Whether a step has failed. The runner was then told to forget requests that begin again."""

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.tokens[request.request_id] = request.output_token_ids

    def step(self) -> SchedulerOutput:
        """Plans one step, and returns the plan. Computes the oldest steps if too many are under way."""
        plan = self.scheduler.schedule()
        assert plan.total_num_scheduled_tokens == sum(plan.num_scheduled_tokens.values())
        assert all(num_tokens > 0 for num_tokens in plan.num_scheduled_tokens.values())
        new = {request.request_id for request in plan.scheduled_new_reqs}
        assert new | set(plan.scheduled_cached_reqs.request_ids) == plan.num_scheduled_tokens.keys()
        self.finished_in_plans += plan.finished_req_ids
        self.under_way.append(plan)
        self._start_loads()
        self.scheduler.check_integrity()
        self.complete(keep=self.num_ahead if plan.num_scheduled_tokens else 0)
        return plan

    def complete(self, keep: int = 0) -> None:
        """Computes the oldest steps, and processes their results, until `keep` steps are left."""
        while len(self.under_way) > keep:
            plan = self.under_way.popleft()
            self.note(flatten(self.scheduler.update_from_output(plan, self.runner.execute(plan))))
            self._start_loads()
            self.scheduler.check_integrity()

    def fail(self) -> None:
        """Makes the oldest step fail, and with it all steps that were planned after it."""
        self.has_failed = True
        failed, *later = self.under_way
        self.under_way.clear()
        for plan in later:
            self._start_loads(plan)
        self.note(flatten(self.scheduler.retry_in_halves(failed, later, "on fire")))
        self.scheduler.check_integrity()

    def note(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ends, "nothing comes after the end"
            tokens = self.tokens[output.request_id]
            assert output.first_position == len(tokens), "each position once, in order"
            tokens += output.token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason

    def run_to_end(
        self, before_step: Callable[[], None] = lambda: None, max_steps: int = 20_000
    ) -> dict[str, list[int]]:
        """Steps until no request is left; returns the tokens of each request."""
        for _ in range(max_steps):
            before_step()
            if not self.scheduler.has_requests():
                self.complete()
                self.step()  # tells the runner about the last ends
                self.check_rest()
                return self.tokens
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.request_counts()}")

    def _start_loads(self, plan: SchedulerOutput | None = None) -> None:
        """Starts the loads of the oldest step, since all steps before it are computed."""
        if self.connector is not None and (plan or self.under_way):
            self.connector.start_load_kv((plan or self.under_way[0]).kv_connector_metadata or {})

    def check_rest(self) -> None:
        """Checks behaviour 14: each request has ended once, and the runner was told."""
        assert_at_rest(self.scheduler)
        assert self.ends.keys() == self.tokens.keys()
        assert set(self.finished_in_plans) == self.tokens.keys()
        assert self.has_failed or len(self.finished_in_plans) == len(self.tokens), "reported once"
