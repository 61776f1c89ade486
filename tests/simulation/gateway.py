"""SimGateway: a stand-in for gateway/dispatcher.py, decision by decision, on events instead of coroutines.

Real: the router, and the session with each worker. It checks what a client may rely on: every token right, each
position once and in order, one end.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from baton.config import GatewayConfig
from baton.errors import WorkerUnavailable
from baton.kv import KVTransferParams, OnLoadFailure, TransferRole
from baton.messages import AbortRequests, Heartbeat, Hello, SubmitRequest
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput
from baton.sampling import SamplingParams
from baton.session import GatewaySession
from gateway.dispatcher import MAX_ATTEMPTS
from gateway.routing.placement import Ask, Mode
from gateway.routing.router import Router
from tests.simulation.attempts import Attempt, AttemptFailed, ClientRequest, End, RequestFailed, failure
from tests.simulation.scenario import Policy, RequestSpec
from tests.simulation.worker import CLIENT_ID, Worker
from tests.simulation.world import World

MAX_DELAY_S = 0.002


class SimGateway:
    """Everything in flight; `ended` counts how requests came to their ends."""

    def __init__(self, world: World, policy: Policy) -> None:
        self._world = world
        self._policy = policy
        self._router = Router(GatewayConfig(routing_policy="round_robin"), b"prefixes of the simulation")
        self._workers: dict[str, Worker] = {}
        self._silent: set[str] = set()
        self._cut_off: set[str] = set()
        self._sessions: dict[str, GatewaySession] = {}
        self._by_attempt: dict[str, ClientRequest] = {}
        self._last_arrival: dict[tuple[str, str], float] = {}
        self._num_ids = 0
        self.requests: dict[str, ClientRequest] = {}
        self.num_open = 0
        self.ended: Counter[End] = Counter()

    # workers come and go

    def add_worker(self, worker: Worker) -> None:
        """A new life; whatever the last one of this name had is lost."""
        self.lose(worker.name, "replaced")
        self._workers[worker.name] = worker
        self._silent.discard(worker.name)
        session = self._sessions[worker.name] = GatewaySession(worker.incarnation)
        worker.hear(session.hello())
        heartbeat = worker.heartbeat()
        session.note_heartbeat(heartbeat)
        self._router.heard(heartbeat.status)

    def lose(self, name: str, reason: str) -> None:
        if self._workers.pop(name, None) is not None:
            self._router.gone(name)
            self._on_lost(name, reason)

    def note_silence(self, name: str) -> None:
        if name in self._workers and name not in self._silent:
            self._silent.add(name)
            self._router.gone(name)
            self._on_lost(name, "silent")

    def hear_again(self, name: str) -> None:
        self._silent.discard(name)
        if worker := self._workers.get(name):
            self._router.heard(worker.heartbeat().status)

    def cut_off(self, name: str) -> None:
        """Nothing gets through between gateway and worker, in neither direction, until `reconnect`."""
        self._cut_off.add(name)

    def reconnect(self, name: str) -> None:
        """What is said from now on arrives. A Hello and its answer, as they come at a fixed pace, tell what did not."""
        self._cut_off.discard(name)
        self.hear_again(name)
        if worker := self._workers.get(name):
            hello = self._sessions[name].hello()
            self._send("gateway", name, lambda: self._reach(worker, lambda: self._answer(worker, hello)))

    def _answer(self, worker: Worker, hello: Hello) -> None:
        """On a worker's request plane."""
        worker.hear(hello)
        heartbeat = worker.heartbeat()
        self._send(worker.name, "gateway", lambda: self._take_heartbeat(worker, heartbeat))

    def _take_heartbeat(self, worker: Worker, heartbeat: Heartbeat) -> None:
        if self._workers.get(worker.name) is not worker:
            return
        if loss := self._sessions[worker.name].note_heartbeat(heartbeat):
            self._world.counts["path session lost"] += 1
            self._on_lost(worker.name, loss)

    # what clients do

    def arrive(self, spec: RequestSpec) -> None:
        request = self.requests[spec.request_id] = ClientRequest(spec, self._world.now)
        self.num_open += 1
        self._world.log("gateway", f"{spec.request_id} arrives", lambda: spec)
        self._try(request, lambda: self._attempt(request))

    def leave(self, request_id: str) -> None:
        """The client is not there any more."""
        request = self.requests.get(request_id)
        if request is not None and request.end is None:
            self._world.counts["fault client left"] += 1
            self._finish(request, End.LEFT)

    # what workers say

    def outbox(self, worker: Worker, outputs: list[RequestOutput]) -> None:
        """On a worker's thread: sends outputs to the gateway, unless it finds no connection, or has no session."""
        if not worker.sessions.count_outputs(CLIENT_ID):
            return
        if worker.name in self._cut_off and self._world.chance(0.5):
            worker.lose_gateway()
            return

        def arrive() -> None:
            if self._workers.get(worker.name) is worker:
                self._sessions[worker.name].note_outputs()
                for output in outputs:
                    self._on_output(worker.name, output)

        self._send(worker.name, "gateway", arrive)

    def _on_output(self, worker: str, output: RequestOutput) -> None:
        self._world.log("gateway", f"<- {worker} {output.request_id} {_brief(output)}", lambda: output)
        request = self._by_attempt.get(output.request_id)
        if request is not None and request.end is None:
            self._try(request, lambda: self._take(request, worker, output))

    def _on_lost(self, worker: str, reason: str) -> None:
        self._world.log("gateway", f"lost {worker} {reason}")
        for request in list(self._by_attempt.values()):
            if request.attempt is not None and worker in request.attempt.open_legs and request.end is None:
                self._try(request, partial(self._take_loss, request, worker, reason))

    # one request

    def _try(self, request: ClientRequest, action: Callable[[], None]) -> None:
        """Does it; where the attempt fails, goes on with the next, until one is under way or nobody is left."""
        while True:
            try:
                action()
            except AttemptFailed as failure:
                self._world.counts["path attempt failed"] += 1
                self._close(request)
                request.failed[failure.worker] = failure
                if error := self._reason_to_give_up(request, failure):
                    self._finish(request, End.ERROR, error)
                    return
                action = partial(self._attempt, request)
            except (WorkerUnavailable, RequestFailed) as error:
                self._finish(request, End.ERROR, str(error))
                return
            else:
                return

    def _reason_to_give_up(self, request: ClientRequest, failure: AttemptFailed) -> str | None:
        if self._time_left(request) == 0.0:
            return "the request's deadline passed"
        is_final = failure.is_prompt_lost and self._policy == "fail"
        if is_final or request.num_attempts >= MAX_ATTEMPTS:
            return f"gave up: {failure}"
        return None

    def _attempt(self, request: ClientRequest) -> None:
        spec = request.spec
        is_last = request.num_attempts + 1 == MAX_ATTEMPTS and spec.mode is not Mode.DISAGGREGATED
        placement = self._router.route(
            Ask(
                token_ids=spec.prompt,
                max_new_tokens=spec.max_tokens,
                mode=spec.mode,
                excluded=[worker for worker, failed in request.failed.items() if not failed.may_ask_again],
                without_prefill=is_last,
            )
        )
        request.num_attempts += 1
        request.num_tokens_at_end = None
        self._world.counts[f"path attempt {request.num_attempts} {placement.mode.value}"] += 1
        copes = self._policy == "recompute" and spec.mode is not Mode.DISAGGREGATED
        attempt = Attempt(self._new_id(), placement, placement.prefill is not None and copes)
        request.attempt = attempt
        self._by_attempt[attempt.engine_request_id] = request
        self._submit(request, attempt)

    def _submit(self, request: ClientRequest, attempt: Attempt) -> None:
        spec, placement = request.spec, attempt.placement
        leg = EngineRequest(
            request_id=attempt.engine_request_id,
            prompt_token_ids=spec.prompt,
            sampling_params=SamplingParams(max_tokens=spec.max_tokens, seed=1),
            priority=spec.priority,
            timeout_s=self._time_left(request),
            cache_salt=spec.cache_salt,
        )
        decode = self._workers[placement.decode]
        if placement.prefill is None:
            self._send_leg(decode, leg, attempt)
            return
        prefill = self._workers[placement.prefill]
        transfer_id, number = self._new_id(), request.num_attempts - 1
        on_failure = OnLoadFailure.RECOMPUTE if attempt.decoder_copes else OnLoadFailure.REPORT
        to_decode = KVTransferParams(TransferRole.CONSUMER, transfer_id, number, prefill.ref, on_failure)
        to_prefill = KVTransferParams(TransferRole.PRODUCER, transfer_id, number, decode.ref, on_failure)
        self._send_leg(decode, replace(leg, kv_transfer=to_decode), attempt)
        self._send_leg(prefill, replace(leg, kv_transfer=to_prefill), attempt)

    def _send_leg(self, worker: Worker, leg: EngineRequest, attempt: Attempt) -> None:
        attempt.open_legs.add(worker.name)
        self._router.sent(worker.name, attempt.placement)
        self._order(worker, self._sessions[worker.name].submit(leg))

    def _take_loss(self, request: ClientRequest, worker: str, reason: str) -> None:
        attempt = request.attempt
        assert attempt is not None
        is_prefill = worker == attempt.placement.prefill
        is_decoding = attempt.open_legs != {worker}
        if is_prefill and attempt.decoder_copes and is_decoding:
            self._end_leg(worker, attempt)
            return
        raise AttemptFailed(worker, f"lost: {reason}", is_prompt_lost=is_prefill, may_ask_again=True)

    def _take(self, request: ClientRequest, worker: str, news: RequestOutput) -> None:
        """Dispatcher._take, in its order."""
        attempt = request.attempt
        if attempt is None or news.request_id != attempt.engine_request_id:
            return
        placement = attempt.placement
        is_prefill = worker == placement.prefill
        if news.finish_reason is not None:
            self._end_leg(worker, attempt)
        if news.finish_reason is FinishReason.ABORT and attempt.open_legs:
            return
        if news.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            copes = attempt.decoder_copes and attempt.open_legs
            if is_prefill and news.error_kind is ErrorKind.INTERNAL and copes:
                return
            raise failure(placement, is_prefill, news)
        self._check_times(worker, news)
        self._note_path(request, is_prefill, news)
        self._accept(request, worker, news)
        if request.end is None and not attempt.open_legs:
            raise AttemptFailed(placement.decode, "no worker goes on with it")

    def _accept(self, request: ClientRequest, worker: str, news: RequestOutput) -> None:
        expected = request.expected
        for position, token_id in enumerate(news.token_ids, news.first_position):
            if position >= len(expected) or token_id != expected[position]:
                wanted = expected[position] if position < len(expected) else "nothing"
                self._world.violate(
                    "tokens are right",
                    f"{request.spec.request_id} from {worker}: {token_id} at {position}, not {wanted}",
                )
            if position >= len(request.tokens):
                request.early.setdefault(position, token_id)
        while len(request.tokens) in request.early:
            request.tokens.append(request.early.pop(len(request.tokens)))
        if news.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            request.num_tokens_at_end = news.first_position + len(news.token_ids)
        if request.num_tokens_at_end is not None and len(request.tokens) >= request.num_tokens_at_end:
            self._finish(request, End.DONE)

    def _check_times(self, worker: str, news: RequestOutput) -> None:
        """Whatever happened to a transfer, its events are in order, and a worker tells of one it was part of."""
        for transfer in news.stage_times.transfers if news.stage_times else ():
            times = [event.at_s for event in transfer.events]
            self._world.counts[f"transfer {transfer.events[-1].kind.value}"] += 1
            if times != sorted(times) or times[0] < 0.0 or transfer.peer == worker:
                self._world.violate("times are in order", f"{worker}: {transfer}")

    def _note_path(self, request: ClientRequest, is_prefill: bool, news: RequestOutput) -> None:
        """How often each way was really gone."""
        placement = request.attempt.placement if request.attempt else None
        if news.finish_reason is FinishReason.STOP and is_prefill:
            self._world.counts["path ended with token 0"] += 1
        if news.stage_times is None or placement is None or placement.prefill is None or is_prefill:
            return
        self._router.measured(placement, news.stage_times)
        kind = "handed over" if news.stage_times.transfer_bytes else "recomputed on decode"
        self._world.counts[f"path {kind}"] += 1

    def _finish(self, request: ClientRequest, end: End, error: str = "") -> None:
        if request.end is not None:
            self._world.violate("ends once", f"{request.spec.request_id} ends as {request.end} and as {end}")
        request.end, request.error = end, error
        self.num_open -= 1
        self.ended[end] += 1
        self._world.log("gateway", f"{request.spec.request_id} {end.value} {len(request.tokens)} {error}")
        if end is End.DONE and tuple(request.tokens) != request.expected:
            self._world.violate("success is whole", f"{request.spec.request_id}: {request.tokens}")
        self._close(request)

    def _close(self, request: ClientRequest) -> None:
        """Ends what is left of the attempt on its workers."""
        attempt, request.attempt = request.attempt, None
        if attempt is None:
            return
        self._by_attempt.pop(attempt.engine_request_id, None)
        for name in sorted(attempt.open_legs):
            self._end_leg(name, attempt)
            if worker := self._workers.get(name):
                self._order(worker, self._sessions[name].abort((attempt.engine_request_id,)))

    def _end_leg(self, worker: str, attempt: Attempt) -> None:
        if worker in attempt.open_legs:
            attempt.open_legs.remove(worker)
            self._router.ended(worker, attempt.placement)

    # the request plane: in order and reliable, except that it can be cut

    def _order(self, worker: Worker, order: SubmitRequest | AbortRequests) -> None:
        self._sessions[worker.name].count_order()
        self._send("gateway", worker.name, lambda: self._reach(worker, lambda: worker.take(order)))

    def _send(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """Lost if the two are cut off from each other when it is sent, or when it would arrive."""

        def try_to_arrive() -> None:
            if source in self._cut_off or target in self._cut_off:
                self._world.counts["fault request plane cut"] += 1
            else:
                arrive()

        if source in self._cut_off or target in self._cut_off:
            try_to_arrive()
            return
        when = self._world.now + self._world.between(0.0001, MAX_DELAY_S)
        when = self._last_arrival[source, target] = max(when, self._last_arrival.get((source, target), 0.0))
        self._world.at(when, try_to_arrive)

    def _reach(self, worker: Worker, action: Callable[[], None]) -> None:
        if not worker.is_dead:
            action()

    def _time_left(self, request: ClientRequest) -> float | None:
        timeout_s = request.spec.timeout_s
        return None if timeout_s is None else max(0.0, timeout_s - (self._world.now - request.arrived_at))

    def _new_id(self) -> str:
        self._num_ids += 1
        return f"e{self._num_ids}"


def _brief(output: RequestOutput) -> str:
    reason = output.finish_reason.value if output.finish_reason else ""
    return f"{output.first_position} {list(output.token_ids)} {reason}"
