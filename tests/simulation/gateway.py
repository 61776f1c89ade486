"""SimGateway: a stand-in for gateway/requests/dispatcher.py on events instead of coroutines.

Real: everything that decides (journey, attempts, waiting room, roster, router), and the session with each worker. It
checks what a client may rely on: every token right, each position once and in order, one end.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from baton.config import GatewayConfig
from baton.errors import RequestError
from baton.messages.request_plane import SubmitRequest
from baton.messages.session import GatewaySession
from baton.request import EngineRequest, FinishReason, RequestOutput
from baton.sampling import SamplingParams
from baton.worker import KVBlockCounts, WorkerStatus
from gateway.requests.attempt import Attempt, AttemptFailed, legs
from gateway.requests.journey import Errand, Journey
from gateway.requests.waiting import Seat, WaitingRoom
from gateway.routing.placement import NoRoom
from gateway.routing.router import Router
from gateway.workers.worker_list import WorkerList
from tests.simulation.attempts import ClientRequest, End, brief
from tests.simulation.scenario import Policy, RequestSpec
from tests.simulation.worker import Worker
from tests.simulation.worker_links import WorkerLinks
from tests.simulation.world import World

_PLENTY = KVBlockCounts(total=10**6, free=10**6, leased=0, quarantined=0)

HEARTBEAT_S = 0.05


class SimGateway:
    """Everything in flight; `ended` counts how requests came to their ends."""

    def __init__(
        self, world: World, policy: Policy, *, name: str = "gateway", knows_room: bool = True
    ) -> None:
        """Without `knows_room` it sends more than decode workers have room for, as several gateways at once would."""
        self.name = name
        self._world = world
        self._knows_room = knows_room
        self._policy = policy
        self._config = GatewayConfig(routing_policy="round_robin", placement_timeout_s=8.0)
        self.router = Router(self._config, b"prefixes of the simulation")
        self._worker_list = WorkerList()
        max_queued = self._config.max_queued
        self._room = WaitingRoom[ClientRequest](max_queued, self._try_to_place, self._turn_away)
        self._is_sweep_due = False
        self._is_listening = False
        self.links = WorkerLinks(world, name, self)
        self._by_attempt: dict[str, ClientRequest] = {}
        self._num_ids = 0
        self._id_prefix = "e" if name == "gateway" else f"{name}-e"
        self.requests: dict[str, ClientRequest] = {}
        self.num_open = 0
        self.ended: Counter[End] = Counter()

    @property
    def num_waiting(self) -> int:
        return len(self._room)

    @property
    def num_with_workers(self) -> int:
        return len(self._by_attempt)

    # what workers say: Listener

    def heard(self, status: WorkerStatus) -> None:
        self._worker_list.heard(status)
        if not self._knows_room:
            status = replace(status, kv_blocks=_PLENTY)
        self.router.heard(status)
        self._note_room()

    def gone(self, worker: str) -> None:
        self._worker_list.gone(worker)
        self.router.gone(worker)

    def lost(self, worker: str, reason: str) -> None:
        self._world.log(self.name, f"lost {worker} {reason}")
        for request in list(self._by_attempt.values()):
            attempt = request.attempt
            if attempt is not None and worker in attempt.workers:
                self._try(request, partial(attempt.note_loss, worker, reason))

    def output(self, worker: str, output: RequestOutput) -> None:
        self._world.log(self.name, f"<- {worker} {output.request_id} {brief(output)}", lambda: output)
        request = self._by_attempt.get(output.request_id)
        if request is not None and request.end is None:
            self._try(request, lambda: self._take(request, worker, output))

    # what clients do

    def arrive(self, spec: RequestSpec) -> None:
        errand = Errand(
            prompt_token_ids=spec.prompt,
            max_tokens=spec.max_tokens,
            cache_salt=spec.cache_salt,
            mode=spec.mode,
        )
        journey = Journey(errand, self._policy, self._worker_list, self._world.now)
        request = self.requests[spec.request_id] = ClientRequest(spec, self._world.now, journey)
        self.num_open += 1
        self._world.log(self.name, f"{spec.request_id} arrives", lambda: spec)
        self._seek(request)

    def leave(self, request_id: str) -> None:
        """The client is not there any more."""
        request = self.requests.get(request_id)
        if request is not None and request.end is None:
            self._world.counts["fault client left"] += 1
            self._finish(request, End.LEFT)

    def die(self) -> tuple[list[Worker], list[RequestSpec]]:
        """As by SIGKILL: its clients have lost their connections. The workers that will find out, and what was lost."""
        workers = self.links.die()
        lost = [request for request in self.requests.values() if request.end is None]
        for request in lost:
            self._finish(request, End.LEFT)
        return workers, [request.spec for request in lost]

    # one request

    def _seek(self, request: ClientRequest) -> None:
        """A place, at once or in time."""
        try:
            seat = self._room.join(request, self._world.now)
        except RequestError as error:
            self._finish(request, End.ERROR, str(error))
            return
        request.seat = seat
        if seat is not None:
            self._world.counts["path waited"] += 1
            until = request.journey.seeking_since + self._config.placement_timeout_s
            if (time_left_s := request.time_left(self._world.now)) is not None:
                until = min(until, self._world.now + time_left_s)
            self._world.at(until, lambda: self._give_up_waiting(request, seat), is_plane=False)
            self._listen_soon()

    def _give_up_waiting(self, request: ClientRequest, seat: Seat[ClientRequest]) -> None:
        if seat in self._room:
            reason = seat.reason or NoRoom("others came first")
            waited_s, retry_after_s = self._config.placement_timeout_s, self._room.retry_after_s(seat)
            self._finish(request, End.ERROR, str(request.journey.too_late(reason, waited_s, retry_after_s)))

    def _turn_away(self, request: ClientRequest, error: RequestError) -> None:
        self._world.counts["path turned away"] += 1
        self._finish(request, End.ERROR, str(error))

    def _try_to_place(self, request: ClientRequest) -> RequestError | None:
        try:
            placement = request.journey.route(self.router, tuple(request.tokens))
        except RequestError as error:
            return error
        attempt = request.journey.begin(placement, self._new_id(), len(request.tokens), self._world.now)
        number = min(request.journey.num_attempts, 4)
        self._world.counts[f"path attempt {number} {placement.mode.value}"] += 1
        self._world.counts["path resumed"] += bool(request.tokens)
        request.begin_attempt(attempt)
        self._by_attempt[attempt.engine_request_id] = request
        self._submit(request, attempt)
        return None

    def _try(self, request: ClientRequest, action: Callable[[], None]) -> None:
        """Does it; where the attempt fails, the request goes on with the next one, or ends."""
        attempt = request.attempt
        assert attempt is not None
        try:
            action()
        except AttemptFailed as failure:
            self._world.counts["path attempt failed"] += 1
            self._world.counts[f"path {failure.cause.value}"] += 1
            self._close(request)
            error = request.journey.end(attempt, failure, len(request.tokens), self._world.now)
            if len(request.tokens) >= request.spec.max_tokens:
                self._finish(request, End.DONE)
            elif request.time_left(self._world.now) == 0.0:
                self._finish(request, End.ERROR, "the request's deadline passed")
            elif error is not None:
                self._finish(request, End.ERROR, str(error))
            else:
                self._seek(request)
                self._listen_soon()
        except RequestError as error:
            self._finish(request, End.ERROR, str(error))
        finally:
            self._count_ended_legs(attempt)

    def _submit(self, request: ClientRequest, attempt: Attempt) -> None:
        spec = request.spec
        leg = EngineRequest(
            request_id=attempt.engine_request_id,
            prompt_token_ids=spec.prompt,
            sampling_params=SamplingParams(max_tokens=spec.max_tokens, seed=1),
            priority=spec.priority,
            timeout_s=request.time_left(self._world.now),
            cache_salt=spec.cache_salt,
            output_token_ids=tuple(request.tokens),
            on_preemption=request.journey.on_preemption(attempt.placement),
        )
        refs = {name: self.links[name].ref for name in attempt.workers}
        for name, order in legs(leg, attempt, refs, self._new_id(), request.journey.num_attempts - 1):
            self.router.sent(name, attempt.placement)
            self.links.order(name, partial(_submit, order))

    def _take(self, request: ClientRequest, worker: str, news: RequestOutput) -> None:
        """Dispatcher._take, in its order."""
        attempt = request.attempt
        if attempt is None or news.request_id != attempt.engine_request_id:
            return
        is_for_client = attempt.take(worker, news)
        if (name := attempt.leg_to_abort()) is not None:
            self._tell(name, attempt)
        if not is_for_client:
            return
        self._check_times(worker, news)
        self._note_path(attempt, worker, news)
        if news.token_ids and news.first_position < attempt.num_tokens_before:
            self._world.violate("nothing is computed twice", f"{worker}: {news} behind {request.tokens}")
        self._accept(request, worker, news)
        if request.end is None:
            attempt.check_under_way()

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

    def _note_path(self, attempt: Attempt, worker: str, news: RequestOutput) -> None:
        """How often each way was really gone."""
        if news.finish_reason is FinishReason.STOP and worker == attempt.placement.prefill:
            self._world.counts["path ended with token 0"] += 1
        if times := attempt.decode_times(worker, news):
            self.router.measured(attempt.placement, times)
            if attempt.placement.prefill is not None:
                kind = "recomputed on decode" if attempt.has_recomputed(times) else "handed over"
                self._world.counts[f"path {kind}"] += 1

    def _finish(self, request: ClientRequest, end: End, error: str = "") -> None:
        if request.end is not None:
            self._world.violate("ends once", f"{request.spec.request_id} ends as {request.end} and as {end}")
        request.end, request.error = end, error
        if request.seat is not None:
            self._room.leave(request.seat, self._world.now)
        self.num_open -= 1
        self.ended[end] += 1
        self._world.log(self.name, f"{request.spec.request_id} {end.value} {len(request.tokens)} {error}")
        if end is End.DONE and tuple(request.tokens) != request.expected:
            self._world.violate("success is whole", f"{request.spec.request_id}: {request.tokens}")
        self._close(request)

    def _close(self, request: ClientRequest) -> None:
        """Ends what is left of the attempt on its workers."""
        attempt, request.attempt = request.attempt, None
        if attempt is None:
            return
        del self._by_attempt[attempt.engine_request_id]
        for name in attempt.close():
            self._tell(name, attempt)
        self._count_ended_legs(attempt)

    def _tell(self, name: str, attempt: Attempt) -> None:
        self.links.order(name, lambda session: session.abort((attempt.engine_request_id,)))

    def _count_ended_legs(self, attempt: Attempt) -> None:
        for worker in attempt.take_ended_legs():
            self.router.ended(worker, attempt.placement)
            self._note_room()

    def _note_room(self) -> None:
        """There may be some; whoever waits is asked for soon."""
        if len(self._room) and not self._is_sweep_due:
            self._is_sweep_due = True
            self._world.after(0.0, self._sweep, is_plane=False)

    def _sweep(self) -> None:
        self._is_sweep_due = False
        self._room.sweep(self._world.now)

    def _listen_soon(self) -> None:
        """Heartbeats come at a fixed pace; here, only while they may matter to somebody."""
        if not self._is_listening:
            self._is_listening = True
            self._world.after(HEARTBEAT_S, self._listen, is_plane=False)

    def _listen(self) -> None:
        self._is_listening = False
        self.links.hear_all()
        if len(self._room):
            self._listen_soon()

    def _new_id(self) -> str:
        self._num_ids += 1
        return f"{self._id_prefix}{self._num_ids}"


def _submit(request: EngineRequest, session: GatewaySession) -> SubmitRequest:
    return session.submit(request)
