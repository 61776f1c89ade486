"""Any order of arrivals, steps, transfers' ends, aborts and resets: nothing leaks, no token is lost or changed."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.kv import OnLoadFailure, TransferRole
from baton.kv_groups import ONE_GROUP, KVGroups
from baton.request import FinishReason, OnPreemption
from baton.sampling import GrammarKind, StructuredOutput
from baton.step import ClientOutputs, KVConnectorOutput
from scheduler import Request, RequestStatus
from tests.factories.driving import Driver
from tests.factories.guesses import forces, guesses
from tests.factories.paged_memory import PagedMemory
from tests.factories.scheduling import (
    FakeConnector,
    FakeRunner,
    failed,
    flatten,
    make_request,
    make_scheduler,
    received,
    token_at,
)

MAX_STEPS = 10_000
"""At the end. With one token a step, forty requests of a hundred tokens need half as many."""

ORDERS: list[dict[str, object]] = [
    {"policy": "fcfs"},
    {"policy": "priority"},
    {"policy": "priority", "priority_ageing_s": 2.0},
]
PREEMPTIONS: list[dict[str, object]] = [
    {"preemption": "recompute"},
    {"preemption": "swap", "num_swap_blocks": 6},
    {"preemption": "swap", "num_swap_blocks": 6},
]
GROUPS = [ONE_GROUP, ONE_GROUP, KVGroups(1, 1, 20), KVGroups(1, 2, 33), KVGroups(2, 1, 5), KVGroups(0, 1, 16)]
GRAMMARS = [StructuredOutput(GrammarKind.REGEX, source) for source in ("yes|no", "[0-9]+")]


def next_token(request: Request) -> int:
    """The token that arrives together with a loaded prompt."""
    return token_at(request.request_id, request.num_output_tokens)


class SchedulerMachine(RuleBasedStateMachine):
    """One small engine. The runner reads back every slot; the connector overwrites all blocks that it may still
    write."""

    @initialize(
        order=st.sampled_from(ORDERS),
        batching=st.sampled_from(["unified", "unified", "unchunked", "prefill_first", "mini_vllm", "mixed"]),
        preemption=st.sampled_from(PREEMPTIONS),
        num_blocks=st.integers(10, 24),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 7, 40, 200]),
        threshold=st.sampled_from([0, 9, 50]),
        is_caching=st.booleans(),
        num_ahead=st.integers(0, 2),
        num_drafts=st.sampled_from([0, 0, 3]),
        groups=st.sampled_from(GROUPS),
    )
    def build(
        self,
        order: dict[str, object],
        batching: str,
        preemption: dict[str, object],
        num_ahead: int,
        num_drafts: int,
        budget: int,
        threshold: int,
        is_caching: bool,
        groups: KVGroups,
        num_blocks: int,
        **settings: object,
    ) -> None:
        self.splits_prompts = batching == "unified"
        if batching == "unchunked":
            settings |= {"enable_chunked_prefill": False, "max_model_len": 200}
        elif batching == "mini_vllm":
            settings |= {"batching": "prefill_first", "prefill_first_rules": batching}
        elif batching != "unified":
            settings |= {"batching": batching}
        if batching in ("unified", "unchunked"):
            settings |= {"long_prefill_token_threshold": threshold}
        self.budget = budget if self.splits_prompts else 200
        self.connector = FakeConnector(holds=True, memory=PagedMemory(16, groups))
        self.scheduler = make_scheduler(
            self.connector,
            max_num_batched_tokens=self.budget,
            enable_prefix_caching=is_caching,
            async_scheduling=num_ahead > 0,
            num_speculative_tokens=num_drafts,
            kv_groups=groups,
            num_blocks=1 + (num_blocks - 1) * groups.num_groups,
            **order,
            **preemption,
            **settings,
        )
        runner = FakeRunner(memory=self.connector.memory, guess=guesses(num_drafts), force=forces())
        self.driver = Driver(self.scheduler, runner, num_ahead, self.connector)
        self.requests: dict[str, Request] = {}

    @rule(
        stem=st.integers(0, 2),
        stem_length=st.integers(0, 60),
        tail_length=st.integers(1, 50),
        max_tokens=st.integers(1, 20),
        num_outputs=st.just(0) | st.integers(0, 19),
        priority=st.integers(0, 2),
        role=st.sampled_from([None, None, TransferRole.CONSUMER, TransferRole.PRODUCER]),
        cache_salt=st.sampled_from([None, None, "a", "b"]),
        grammar=st.sampled_from([None, None, None, *GRAMMARS]),
        on_failure=st.sampled_from(OnLoadFailure),
        on_preemption=st.sampled_from(OnPreemption),
        skips_cache=st.booleans(),
    )
    def add(
        self,
        stem: int,
        stem_length: int,
        tail_length: int,
        max_tokens: int,
        num_outputs: int,
        priority: int,
        role: TransferRole | None,
        cache_salt: str | None,
        grammar: StructuredOutput | None,
        on_failure: OnLoadFailure,
        on_preemption: OnPreemption,
        skips_cache: bool,
    ) -> None:
        number = len(self.requests)
        request = make_request(
            request_id=f"r{number}",
            prompt=[*[stem] * stem_length, *[100 + number] * tail_length],
            max_tokens=max_tokens,
            priority=priority,
            arrival_time=float(number),
            role=role,
            on_failure=on_failure,
            on_preemption=on_preemption,
            skip_reading_prefix_cache=skips_cache,
            cache_salt=cache_salt,
            structured_output=grammar,
            output_token_ids=[token_at(f"r{number}", i) for i in range(min(num_outputs, max_tokens - 1))],
        )
        self.requests[request.request_id] = request
        self.driver.add(request)

    @precondition(lambda self: self.scheduler.wanted_grammars())
    @rule(data=st.data(), error=st.sampled_from([None, None, "no such rule"]))
    def end_compilation(self, data: st.DataObject, error: str | None) -> None:
        grammar = data.draw(st.sampled_from(sorted(self.scheduler.wanted_grammars(), key=str)))
        self.note(self.scheduler.grammar_compiled(grammar, error))

    @rule()
    def change_what_the_connector_knows(self) -> None:
        self.connector.is_unknown = not self.connector.is_unknown

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            plan = self.driver.step()
            assert plan.total_num_scheduled_tokens <= self.budget

    @precondition(lambda self: self.connector.loading)
    @rule(
        data=st.data(),
        num_valid_blocks=st.none() | st.integers(0, 4),
        is_unneeded=st.booleans(),
        is_repeated=st.booleans(),
    )
    def end_load(
        self, data: st.DataObject, num_valid_blocks: int | None, is_unneeded: bool, is_repeated: bool
    ) -> None:
        request = data.draw(st.sampled_from(list(self.connector.loading.values())))
        news = received(request, next_token(request))
        if request.is_finished:
            news = KVConnectorOutput(quiesced=(request.request_id,))
        elif num_valid_blocks is not None:
            num_groups = self.connector.memory.groups.num_groups
            num_rows = len(self.connector.started[request.request_id][0]) // num_groups
            news = failed(request, min(num_valid_blocks, num_rows), is_unneeded)
        for _ in range(1 + is_repeated):
            self.note(self.scheduler.update_connector_output(news))

    @precondition(lambda self: self.connector.leased)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.connector.leased)))
        self.note(self.scheduler.update_connector_output(KVConnectorOutput(finished_sending=(request_id,))))

    @precondition(lambda self: self.scheduler.request_ids)
    @rule(
        data=st.data(),
        status=st.sampled_from([RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_GIVEN_BACK]),
    )
    def end(self, data: st.DataObject, status: RequestStatus) -> None:
        request_id = data.draw(st.sampled_from(self.scheduler.request_ids))
        self.note(self.scheduler.finish_requests([request_id], status))

    @rule()
    def complete(self) -> None:
        """The device catches up with all that was planned."""
        self.driver.complete()

    @precondition(lambda self: self.driver.under_way)
    @rule()
    def fail(self) -> None:
        self.driver.fail()

    @rule()
    def reset(self) -> None:
        assert self.scheduler.reset_prefix_cache(force=True)

    @invariant()
    def every_block_and_request_is_accounted_for(self) -> None:
        self.scheduler.check_integrity()
        blocks = self.scheduler.kv_block_counts()
        ended_loads = [i for i in self.connector.under_way if self.requests[i].is_finished]
        assert (blocks.quarantined > 0) == bool(ended_loads), "neither freed early nor forgotten"
        assert blocks.leased > 0 or not self.connector.leased
        live = self.requests.keys() - self.driver.ends.keys()
        assert live == set(self.scheduler.request_ids)
        live_requests = (self.requests[request_id] for request_id in live)
        assert self.driver.under_way or not any(r.num_output_placeholders for r in live_requests)

    def teardown(self) -> None:
        """Checks that all requests can end and everything comes to rest, whatever happened before."""
        self.connector.is_unknown = False
        for _ in range(MAX_STEPS):
            for grammar in self.scheduler.wanted_grammars():
                self.note(self.scheduler.grammar_compiled(grammar))
            for request in list(self.connector.loading.values()):
                self.note(self.scheduler.update_connector_output(self.good_end(request)))
            for request_id in [*self.connector.leased]:
                self.scheduler.update_connector_output(KVConnectorOutput(finished_sending=(request_id,)))
            self.release_aborted_producers()
            if not self.scheduler.has_requests() and not self.connector.under_way:
                break
            self.driver.step()
        self.driver.complete()
        self.driver.step()
        self.driver.check_rest()
        for request_id, tokens in self.driver.tokens.items():
            assert tokens == [token_at(request_id, position) for position in range(len(tokens))]
            if self.driver.ends[request_id] in (FinishReason.LENGTH, FinishReason.STOP):
                assert len(tokens) == self.requests[request_id].sampling_params.max_tokens

    def good_end(self, request: Request) -> KVConnectorOutput:
        if request.is_finished:
            return KVConnectorOutput(quiesced=(request.request_id,))
        return received(request, next_token(request))

    def release_aborted_producers(self) -> None:
        for request in self.connector.finished:
            if request.is_producer and not request.is_handed_over:
                news = KVConnectorOutput(finished_sending=(request.request_id,))
                self.scheduler.update_connector_output(news)

    def note(self, news: ClientOutputs) -> None:
        self.driver.note(flatten(news))


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
