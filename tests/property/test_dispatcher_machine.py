"""Events in any order into the dispatcher: each request's answer is whole, in order and ends once, and nothing is left.

The workers send right tokens, in pieces, repeatedly and late. They fail, refuse, drain, vanish and come back.
"""

from dataclasses import dataclass, field
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.config import GatewayConfig
from baton.kv import TransferRole, WorkerRef
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput, StageTimes
from baton.sampling import SamplingParams
from baton.transfer import TransferEvent, TransferEventKind, TransferRecord
from baton.worker import KVBlockCounts, RequestCounts, WorkerRole, WorkerState, WorkerStatus
from gateway.auth.callers import Caller
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.events import (
    AbortAt,
    AbortRequested,
    Deliver,
    Effect,
    Event,
    Record,
    Refuse,
    StreamEnded,
    Submitted,
    SubmitTo,
    Tick,
    WorkerOutputs,
    WorkerReported,
)
from gateway.requests.record import OUTCOMES
from gateway.requests.request import GatewayRequest
from gateway.requests.retry import LoadFailurePolicy
from gateway.routing.avoided_pairs import FIRST_PAUSE_S
from gateway.routing.placement import Mode, Pair
from gateway.routing.router import Router
from simulator.driver import SilentText
from tests.factories.dispatching import killed

WORKERS = ("p0", "p1", "d0", "d1")
MAX_QUEUED, MAX_IN_FLIGHT, PATIENCE_S = 4, 6, 10.0
FAILURES = (*ErrorKind, None)
"""None: the worker says that it aborted it."""


@dataclass(eq=False)
class Asked:
    """A client, and the part of the answer that it has."""

    request: GatewayRequest
    tokens: list[int] = field(default_factory=list)
    is_over: bool = False
    """It got its finish, or an error, or has left."""
    is_recorded: bool = False
    engine_ids: set[str] = field(default_factory=set)

    def token(self, position: int) -> int:
        return (hash(self.request.request_id) + 7 * position) % 1_000


class DispatcherMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["retry", "recompute", "fail"]), require_disaggregated=st.booleans())
    def begin(self, policy: LoadFailurePolicy, require_disaggregated: bool) -> None:
        config = GatewayConfig(
            routing_policy="round_robin",
            routing_mode="disaggregated",
            require_disaggregated=require_disaggregated,
        )
        self.require_disaggregated = require_disaggregated
        self.ids = count()
        self.now = 0.0
        self.avoided: frozenset[Pair] = frozenset()
        """Before the current event."""
        self.router = Router(config, b"key")
        self.dispatcher = Dispatcher(
            self.router,
            policy,
            lambda _: str(next(self.ids)),
            max_in_flight=MAX_IN_FLIGHT,
            max_queued=MAX_QUEUED,
            placement_timeout_s=PATIENCE_S,
            require_disaggregated=require_disaggregated,
        )
        self.asked: dict[GatewayRequest, Asked] = {}
        self.ready: set[str] = set()
        self.open: dict[tuple[str, str], EngineRequest] = {}
        """Sub-requests at workers."""
        self.closed: list[tuple[str, EngineRequest]] = []
        self.said: dict[tuple[str, str], int] = {}
        """Up to which position a worker has said its tokens."""
        for name in WORKERS:
            self.report(name, 1, False, 9)

    # clients

    @rule(
        caller=st.sampled_from("ab"),
        priority=st.integers(0, 1),
        timeout_s=st.sampled_from([None, 0.0, 3.0, 30.0]),
        mode=st.sampled_from([None, None, Mode.LOCAL, Mode.DISAGGREGATED]),
        max_tokens=st.sampled_from([1, 3, 20]),
    )
    def submit(
        self, caller: str, priority: int, timeout_s: float | None, mode: Mode | None, max_tokens: int
    ) -> None:
        deadline = None if timeout_s is None else self.now + timeout_s
        request = GatewayRequest(
            request_id=f"r{len(self.asked)}",
            prompt_token_ids=(1, 2, 3),
            sampling_params=SamplingParams(max_tokens=max_tokens, seed=0),
            text=SilentText(),
            priority=priority,
            mode=mode,
            deadline=deadline,
            caller=Caller(caller, max_concurrent=6),
        )
        self.asked[request] = Asked(request)
        self.handle(Submitted(request))

    @precondition(lambda self: self.unrecorded())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.unrecorded()))
        asked.is_over = True
        self.handle(StreamEnded(asked.request, GeneratorExit()))

    @precondition(lambda self: self.unrecorded())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Aborts a request by its id. The stream ends when its reader reads on."""
        asked = data.draw(st.sampled_from(self.unrecorded()))
        asked.is_over = True
        self.handle(AbortRequested(asked.request))

    # workers

    @rule(
        name=st.sampled_from(WORKERS),
        incarnation=st.integers(1, 2),
        is_draining=st.sampled_from([False, False, False, True]),
        free=st.sampled_from([0, 3, 9]),
    )
    def report(self, name: str, incarnation: int, is_draining: bool, free: int) -> None:
        role = WorkerRole.PREFILL if name.startswith("p") else WorkerRole.DECODE
        state = WorkerState.DRAINING if is_draining else WorkerState.READY
        ref = WorkerRef(name, f"{name}-{incarnation}", (f"tcp://{name}",), 16)
        (self.ready.discard if is_draining else self.ready.add)(name)
        blocks, requests = KVBlockCounts(9, free, 0, 0), RequestCounts(0, 0, 0)
        self.handle(WorkerReported(WorkerStatus(ref, role, state, blocks, requests, {})))

    @rule(name=st.sampled_from(WORKERS))
    def lose(self, name: str) -> None:
        self.ready.discard(name)
        for worker, engine_id in list(self.open):
            if worker == name:
                self.close(worker, engine_id)
        self.handle(killed(name))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_tokens=st.integers(1, 3), num_again=st.integers(0, 2), skips=st.booleans())
    def say(self, data: st.DataObject, num_tokens: int, num_again: int, skips: bool) -> None:
        """A worker sends some tokens, perhaps some tokens again, perhaps later tokens first."""
        worker, engine_id = data.draw(st.sampled_from(sorted(self.open)))
        sub_request = self.open[worker, engine_id]
        if sub_request.kv_transfer and sub_request.kv_transfer.role is TransferRole.PRODUCER:
            self.close(worker, engine_id)
            first = len(sub_request.output_token_ids)
            return self.outputs(worker, [self.output(sub_request, first, 1, FinishReason.HANDED_OVER)])
        said = self.said[worker, engine_id]
        end = min(said + num_tokens, sub_request.sampling_params.max_tokens)
        is_last = end == sub_request.sampling_params.max_tokens
        first = max(said - num_again, len(sub_request.output_token_ids))
        finish = FinishReason.LENGTH if is_last else None
        outputs = [
            self.output(sub_request, position, 1, finish if position + 1 == end else None)
            for position in range(first, end)
        ]
        self.said[worker, engine_id] = end
        if is_last:
            self.close(worker, engine_id)
        return self.outputs(worker, [*outputs[1:], outputs[0]] if skips else outputs)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), kind=st.sampled_from(FAILURES), is_link_failure=st.booleans())
    def fail(self, data: st.DataObject, kind: ErrorKind | None, is_link_failure: bool) -> None:
        worker, engine_id = data.draw(st.sampled_from(sorted(self.open)))
        sub_request = self.open[worker, engine_id]
        self.close(worker, engine_id)
        reason = FinishReason.ABORT if kind is None else FinishReason.ERROR
        output = self.output(sub_request, len(sub_request.output_token_ids), 0, reason)
        output.error_kind = kind or ErrorKind.INTERNAL
        if kind is ErrorKind.KV_LOAD_FAILED and (transfer := sub_request.kv_transfer) is not None:
            record = TransferRecord(
                role=transfer.role,
                peer=transfer.peer.name,
                attempt=transfer.attempt,
                events=(TransferEvent(TransferEventKind.FAILED, 0.0),),
                is_link_failure=is_link_failure,
            )
            output.stage_times = StageTimes(transfers=(record,))
        self.outputs(worker, [output])

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def say_late(self, data: st.DataObject) -> None:
        """An output arrives that was on its way when the sub-request ended."""
        worker, sub_request = data.draw(st.sampled_from(self.closed))
        self.outputs(worker, [self.output(sub_request, len(sub_request.output_token_ids), 1, None)])

    # time

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 4.0, FIRST_PAUSE_S]))
    def wait(self, seconds: float) -> None:
        """Ticks come when they are due."""
        end = self.now + seconds
        while (deadline := self.dispatcher.next_deadline()) is not None and deadline <= end:
            assert deadline >= self.now, "it is late already"
            self.now = deadline
            self.handle(Tick())
            following = self.dispatcher.next_deadline()
            assert following is None or following > self.now, "a tick leaves nothing that is due"
        self.now = end

    # what follows

    def handle(self, event: Event) -> None:
        events = [event]
        for each in events:
            self.avoided = self.dispatcher.avoided_pairs.at(self.now)
            ended = map(self.check, self.dispatcher.handle(each, self.now))
            events += [event for event in ended if event is not None]

    def check(self, effect: Effect) -> StreamEnded | None:
        match effect:
            case SubmitTo(worker, sub_request):
                self.check_submit(worker, sub_request)
            case AbortAt(worker, engine_id):
                if engine_id not in self.dispatcher._placed:  # else the worker has not reported the end yet
                    self.close(worker, engine_id)
            case Deliver(request, delta):
                asked = self.asked[request]
                assert not asked.is_over, "nothing comes behind the end"
                for token_id in delta.token_ids:
                    assert token_id == asked.token(len(asked.tokens)), "each position once, in order"
                    asked.tokens.append(token_id)
                if delta.finish is not None:
                    asked.is_over = True
                    assert len(asked.tokens) == request.sampling_params.max_tokens
                    assert delta.finish.num_completion_tokens == len(asked.tokens)
                    return StreamEnded(request, None)
            case Refuse(request, error):
                assert not self.asked[request].is_over, "it ends once"
                self.asked[request].is_over = True
                return StreamEnded(request, error)
            case Record(record):
                (asked,) = (one for one in self.asked.values() if one.request.request_id == record.request_id)
                assert not asked.is_recorded, "it is recorded once"
                assert record.num_output_tokens == len(asked.tokens)
                asked.is_recorded = True
        return None

    def check_submit(self, worker: str, sub_request: EngineRequest) -> None:
        engine_id = sub_request.request_id
        request_id = engine_id.rpartition(".")[0]
        (asked,) = (one for one in self.asked.values() if one.request.request_id == request_id)
        assert not asked.is_over
        assert worker in self.ready, "only workers that take requests get some"
        assert sub_request.output_token_ids == tuple(asked.tokens), "it goes on behind what the client has"
        assert asked.request.deadline is None or asked.request.deadline >= self.now, "not after its deadline"
        may_fall_back = asked.request.mode is None and not self.require_disaggregated
        if (transfer := sub_request.kv_transfer) is not None and may_fall_back:
            assert (transfer.peer.name, worker) not in self.avoided, "a pair without a link rests"
        asked.engine_ids.add(engine_id)
        self.open[worker, engine_id] = sub_request
        self.said[worker, engine_id] = len(asked.tokens)

    def close(self, worker: str, engine_id: str) -> None:
        if sub_request := self.open.pop((worker, engine_id), None):
            self.closed.append((worker, sub_request))

    def outputs(self, worker: str, outputs: list[RequestOutput]) -> None:
        self.handle(WorkerOutputs(worker, tuple(outputs)))

    def output(
        self, sub_request: EngineRequest, first: int, num_tokens: int, finish: FinishReason | None
    ) -> RequestOutput:
        request_id = sub_request.request_id.rpartition(".")[0]
        (asked,) = (one for one in self.asked.values() if one.request.request_id == request_id)
        return RequestOutput(
            request_id=sub_request.request_id,
            first_position=first,
            token_ids=tuple(asked.token(position) for position in range(first, first + num_tokens)),
            finish_reason=finish,
        )

    def unrecorded(self) -> list[Asked]:
        return [asked for asked in self.asked.values() if not asked.is_recorded]

    @invariant()
    def nothing_is_lost_or_left(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        dispatcher = self.dispatcher
        counters = dispatcher.tally.counters
        assert counters["received"] == len(self.asked)
        num_open = dispatcher.num_in_flight + dispatcher.num_queued
        assert len(self.unrecorded()) == num_open
        assert counters["received"] == num_open + sum(counters[name] for name in OUTCOMES[1:])
        for asked in self.asked.values():
            if asked.is_over:
                left = [place for place in self.open if place[1] in asked.engine_ids]
                assert not left, "no sub-request of it is open at a worker"
        counted = {name: number for name, number in self.router.num_sub_requests.items() if number}
        assert counted == {
            name: number for name in WORKERS if (number := sum(place[0] == name for place in self.open))
        }

    @invariant()
    def the_queue_is_bounded_and_holds_those_that_wait(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        entries = list(self.dispatcher.queue._queue)
        assert sum(not entry.is_resumed for entry in entries) <= MAX_QUEUED
        assert len(self.dispatcher._placed) <= MAX_IN_FLIGHT
        with_workers = {engine_id for _, engine_id in self.open}
        assert with_workers == set(self.dispatcher._placed)
        waiting = {entry.item.request for entry in entries}
        assert waiting == {
            request
            for request, asked in self.asked.items()
            if not asked.is_over and not asked.engine_ids & with_workers
        }


TestDispatcher = DispatcherMachine.TestCase
TestDispatcher.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
