"""Any order of arrivals, steps, transfers' ends, aborts and resets: nothing leaks, no token is lost or changed."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.kv import TransferRole
from baton.request import FinishReason
from baton.step import EngineCoreOutputs, KVConnectorOutput, SchedulerOutput
from scheduler import Request, RequestStatus
from tests.factories.scheduling import (
    FakeConnector,
    FakeRunner,
    assert_at_rest,
    failed,
    flatten,
    make_request,
    make_scheduler,
    received,
    token_at,
)

MAX_STEPS = 2_000


class SchedulerMachine(RuleBasedStateMachine):
    """One small engine. The runner reads back every slot; the connector scribbles wherever it may still write."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        num_blocks=st.integers(10, 24),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 7, 40, 200]),
        threshold=st.sampled_from([0, 9, 50]),
        is_caching=st.booleans(),
    )
    def build(
        self, policy: str, num_blocks: int, max_num_seqs: int, budget: int, threshold: int, is_caching: bool
    ) -> None:
        self.connector = FakeConnector(holds=True)
        self.runner = FakeRunner(memory=self.connector.memory)
        self.scheduler = make_scheduler(
            self.connector,
            policy=policy,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            enable_prefix_caching=is_caching,
        )
        self.budget = budget
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.finished_in_plans: list[str] = []

    @rule(
        stem=st.integers(0, 2),
        stem_length=st.integers(0, 60),
        tail_length=st.integers(1, 50),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        role=st.sampled_from([None, None, TransferRole.CONSUMER, TransferRole.PRODUCER]),
    )
    def add(
        self,
        stem: int,
        stem_length: int,
        tail_length: int,
        max_tokens: int,
        priority: int,
        role: TransferRole | None,
    ) -> None:
        number = len(self.requests)
        request = make_request(
            request_id=f"r{number}",
            prompt=[*[stem] * stem_length, *[100 + number] * tail_length],
            max_tokens=max_tokens,
            priority=priority,
            arrival_time=float(number),
            role=role,
        )
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []
        self.scheduler.add_request(request)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            plan = self.scheduler.schedule()
            self.check_plan(plan)
            self.note(self.scheduler.update_from_output(plan, self.runner.execute(plan)))

    @precondition(lambda self: self.connector.loading)
    @rule(data=st.data(), num_valid_blocks=st.none() | st.integers(0, 4), is_repeated=st.booleans())
    def end_load(self, data: st.DataObject, num_valid_blocks: int | None, is_repeated: bool) -> None:
        request = data.draw(st.sampled_from(list(self.connector.loading.values())))
        news = received(request, token_at(request.request_id, 0))
        if request.is_finished:
            news = KVConnectorOutput(quiesced=(request.request_id,))
        elif num_valid_blocks is not None:
            num_blocks = len(self.connector.started[request.request_id][0])
            news = failed(request, min(num_valid_blocks, num_blocks))
        for _ in range(1 + is_repeated):
            self.note(self.scheduler.update_connector_output(news))

    @precondition(lambda self: self.connector.leased)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.connector.leased)))
        self.note(self.scheduler.update_connector_output(KVConnectorOutput(finished_sending=(request_id,))))

    @precondition(lambda self: self.scheduler.request_ids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.scheduler.request_ids))
        self.note(self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED))

    @precondition(lambda self: self.scheduler.request_ids)
    @rule(data=st.data())
    def abort_in_mid_step(self, data: st.DataObject) -> None:
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        self.abort(data)
        self.note(self.scheduler.update_from_output(plan, self.runner.execute(plan)))

    @rule()
    def reset(self) -> None:
        assert self.scheduler.reset_prefix_cache(force=True)

    @rule()
    def reset_in_mid_step(self) -> None:
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        result = self.runner.execute(plan)
        assert self.scheduler.reset_prefix_cache(force=True)
        self.note(self.scheduler.update_from_output(plan, result))
        for request_id in result.sampled_token_ids:
            if self.requests[request_id].is_producer and request_id not in self.ends:
                self.runner.forget_last(request_id)

    @invariant()
    def every_block_and_request_is_accounted_for(self) -> None:
        self.scheduler.check_integrity()
        blocks = self.scheduler.kv_block_counts()
        ended_loads = [request for request in self.connector.loading.values() if request.is_finished]
        assert (blocks.quarantined > 0) == bool(ended_loads), "neither freed early nor forgotten"
        assert blocks.leased > 0 or not self.connector.leased
        live = self.requests.keys() - self.ends.keys()
        assert live == set(self.scheduler.request_ids)

    def teardown(self) -> None:
        """Whatever happened, everything can come to its end, and to rest."""
        for _ in range(MAX_STEPS):
            for request in list(self.connector.loading.values()):
                self.note(self.scheduler.update_connector_output(self.good_end(request)))
            for request_id in [*self.connector.leased]:
                self.scheduler.update_connector_output(KVConnectorOutput(finished_sending=(request_id,)))
            self.release_aborted_producers()
            if not self.scheduler.has_requests():
                break
            self.step(1)
        self.check_plan(self.scheduler.schedule())
        assert_at_rest(self.scheduler)
        assert sorted(self.finished_in_plans) == sorted(self.requests), "the runner hears once of every end"
        for request_id, tokens in self.tokens.items():
            if self.ends[request_id] in (FinishReason.LENGTH, FinishReason.STOP):
                assert len(tokens) == self.requests[request_id].sampling_params.max_tokens

    def good_end(self, request: Request) -> KVConnectorOutput:
        if request.is_finished:
            return KVConnectorOutput(quiesced=(request.request_id,))
        return received(request, token_at(request.request_id, 0))

    def release_aborted_producers(self) -> None:
        for request in self.connector.finished:
            if request.is_producer and not request.is_handed_over:
                news = KVConnectorOutput(finished_sending=(request.request_id,))
                self.scheduler.update_connector_output(news)

    def check_plan(self, plan: SchedulerOutput) -> None:
        assert plan.total_num_scheduled_tokens == sum(plan.num_scheduled_tokens.values()) <= self.budget
        assert all(num_tokens > 0 for num_tokens in plan.num_scheduled_tokens.values())
        new = {request.request_id for request in plan.scheduled_new_reqs}
        assert new | set(plan.scheduled_cached_reqs.request_ids) == plan.num_scheduled_tokens.keys()
        self.finished_in_plans += plan.finished_req_ids

    def note(self, news: dict[str, EngineCoreOutputs]) -> None:
        for output in flatten(news):
            assert output.request_id not in self.ends, "nothing comes after the end"
            tokens = self.tokens[output.request_id]
            assert output.first_position == len(tokens), "each position once, in order"
            tokens += output.token_ids
            assert tokens[-1:] in ([], [token_at(output.request_id, len(tokens) - 1)])
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
