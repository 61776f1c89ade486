"""SimGateway: the gateway's own dispatcher on virtual time, and clients that check what they get.

Real: the dispatcher with all its parts, and the session with each worker. Checked: every token is right, each
position arrives once and in order, nothing is computed twice, and each request ends once.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from zlib import crc32

from baton.config import GatewayConfig
from baton.errors import HarmfulRequest
from baton.messages.request_plane import KVEvents
from baton.request import EngineRequest, FinishReason, RequestOutput
from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from baton.worker import KVBlockCounts, WorkerStatus
from gateway.auth.callers import ANYBODY, Caller
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.events import (
    AbortAt,
    Deliver,
    Effect,
    Event,
    Record,
    Refuse,
    StreamEnded,
    Submitted,
    SubmitTo,
    WorkerLost,
    WorkerOutputs,
    WorkerReported,
)
from gateway.requests.record import RequestRecord
from gateway.requests.request import Delta, GatewayRequest
from gateway.requests.retry import LoadFailurePolicy
from gateway.routing.placement import Mode
from gateway.routing.router import Router
from gateway.workers.worker_listener import LossCause
from simulator.driver import SilentText, VirtualDriver
from simulator.model import BREAKS_STEPS, KILLS_WORKERS, answer, prompt_logprobs
from simulator.worker import Worker
from simulator.worker_links import WorkerLinks
from simulator.world import World

_PLENTY = KVBlockCounts(total=10**6, free=10**6, leased=0, quarantined=0)

HEARTBEAT_S = 0.05
GRAMMAR = StructuredOutput(GrammarKind.REGEX, "what the device forces")


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A client's request, and when the client disconnects, if ever."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrives_at: float
    mode: Mode | None
    timeout_s: float | None
    leaves_after_s: float | None
    cache_salt: str | None
    priority: int
    caller: str = ""
    """Empty: the id of the request picks one of three callers."""
    has_grammar: bool = False
    """Whether a grammar forces some of the answer's tokens."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the client wants the log-probabilities of its prompt; every fourth client does."""
        return crc32(self.request_id.encode()) % 4 == 0


class RequestEnd(Enum):
    DONE = "done"
    ERROR = "error"
    LEFT = "left"


@dataclass(slots=True, eq=False)
class Client:
    """One client's request, and the part of the answer that it has received."""

    spec: RequestSpec
    request: GatewayRequest
    expected: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    end: RequestEnd | None = None
    error: str = ""


class SimGateway:
    """One gateway with its clients; `ended` counts how their requests ended."""

    def __init__(
        self,
        world: World,
        policy: LoadFailurePolicy,
        max_model_len: int,
        *,
        name: str = "gateway",
        knows_room: bool = True,
    ) -> None:
        """Without `knows_room`, sends more than decode workers have room for, as several gateways would."""
        self.name = name
        self._world = world
        self._knows_room = knows_room
        self._max_model_len = max_model_len
        self._num_ids = 0
        self._id_prefix = "e" if name == "gateway" else f"{name}-e"
        config = GatewayConfig(routing_policy="round_robin", routing_mode="disaggregated")
        self.router = Router(config, b"prefixes of the simulation")
        self.dispatcher = Dispatcher(
            self.router,
            policy,
            self._draw_id,
            max_in_flight=config.max_in_flight,
            max_queued=config.max_queued,
            placement_timeout_s=8.0,
        )
        self.links = WorkerLinks(world, name, self)
        self._driver = VirtualDriver(world, self.dispatcher, self._carry_out)
        self._is_listening = False
        self._sub_requests: dict[str, tuple[EngineRequest, tuple[int, ...]]] = {}
        """By the id that workers know: the sub-request of an attempt, and the right answer."""
        self._clients: dict[GatewayRequest, Client] = {}
        self.clients: dict[str, Client] = {}
        """Clients by the request's id."""
        self.records: dict[str, RequestRecord] = {}
        self.ended: Counter[RequestEnd] = Counter()

    @property
    def num_open(self) -> int:
        return len(self.clients) - self.ended.total()

    # events from workers: WorkerListener

    def on_status(self, status: WorkerStatus) -> None:
        if not self._knows_room:
            status = replace(status, kv_blocks=_PLENTY)
        self._handle(WorkerReported(status))

    def on_worker_lost(self, worker: str, cause: LossCause, reason: str) -> None:
        self._world.log(self.name, f"lost {worker} {reason}")
        self._handle(WorkerLost(worker, cause, reason))

    def on_outputs(self, worker: str, outputs: tuple[RequestOutput, ...]) -> None:
        for output in outputs:
            self._world.log(
                self.name, f"<- {worker} {output.request_id} {brief(output)}", partial(repr, output)
            )
            self._check_output(worker, output)
        self._handle(WorkerOutputs(worker, outputs))

    def on_kv_events(self, worker: str, events: KVEvents) -> None:
        self.router.on_kv_events(worker, events)

    # events from clients

    def arrive(self, spec: RequestSpec) -> None:
        request = GatewayRequest(
            request_id=spec.request_id,
            prompt_token_ids=spec.prompt,
            sampling_params=SamplingParams(
                max_tokens=spec.max_tokens,
                seed=1,
                prompt_logprobs=0 if spec.wants_prompt_logprobs else None,
                structured_output=GRAMMAR if spec.has_grammar else None,
            ),
            text=SilentText(),
            priority=spec.priority,
            cache_salt=spec.cache_salt,
            mode=spec.mode,
            deadline=None if spec.timeout_s is None else self._world.now + spec.timeout_s,
            caller=Caller(spec.caller or str(crc32(spec.request_id.encode()) % 3), rights=ANYBODY.rights),
        )
        self.clients[spec.request_id] = self._clients[request] = Client(
            spec, request, answer(spec.prompt, spec.max_tokens, self._max_model_len)
        )
        self._world.log(self.name, f"{spec.request_id} arrives", lambda: spec)
        num_queued = self.dispatcher.num_queued
        self._handle(Submitted(request))
        self._world.counts["path waited"] += self.dispatcher.num_queued > num_queued

    def leave(self, request_id: str) -> None:
        """Disconnects the client of a request."""
        client = self.clients.get(request_id)
        if client is not None and client.end is None:
            self._world.counts["fault client left"] += 1
            self._handle(self._end(client, RequestEnd.LEFT, GeneratorExit()))

    def die(self) -> tuple[list[Worker], list[RequestSpec]]:
        """Ends the gateway and its connections, as SIGKILL does. Returns its workers and lost requests."""
        workers = self.links.die()
        lost = [client for client in self.clients.values() if client.end is None]
        for client in lost:
            self._handle(self._end(client, RequestEnd.LEFT, GeneratorExit()))
        return workers, [client.spec for client in lost]

    # the loop

    def _handle(self, event: Event) -> None:
        self._driver.handle(event)
        if self.dispatcher.num_queued:
            self._listen_soon()

    def _carry_out(self, effect: Effect) -> StreamEnded | None:
        match effect:
            case Deliver(request, delta):
                return self._deliver(self._clients[request], delta)
            case Refuse(request, error):
                if isinstance(error, HarmfulRequest):
                    self._world.counts["path stopped"] += 1
                    # Two accidents at two workers look like a request that no device can compute.
                    is_mistaken = self._world.accidents[request.prompt_token_ids] > 1
                    if request.prompt_token_ids[0] not in (BREAKS_STEPS, KILLS_WORKERS) and not is_mistaken:
                        self._world.violate("only poison is stopped", f"{request.request_id}: {error}")
                self._world.counts["path turned away"] += not self._clients[request].tokens
                return self._end(self._clients[request], RequestEnd.ERROR, error)
            case SubmitTo(worker, sub_request):
                self._note_submit(worker, sub_request)
                self.links.send(worker, lambda session: session.submit(sub_request))
            case AbortAt(worker, engine_request_id):
                self.links.send(worker, lambda session: session.abort((engine_request_id,)))
            case Record(record):
                self._note_record(record)
        return None

    def _listen_soon(self) -> None:
        """Lets the next heartbeats arrive at their fixed pace. Here, heartbeats arrive only while requests wait."""
        if not self._is_listening:
            self._is_listening = True
            self._world.after(HEARTBEAT_S, self._listen, is_plane=False)

    def _listen(self) -> None:
        self._is_listening = False
        self.links.deliver_heartbeats()
        if self.dispatcher.num_queued:
            self._listen_soon()

    # what is checked

    def _deliver(self, client: Client, delta: Delta) -> StreamEnded | None:
        if client.end is not None:
            self._world.violate("ends once", f"{client.spec.request_id} gets {delta} after {client.end}")
        wanted = (
            prompt_logprobs(client.spec.prompt, 1, len(client.spec.prompt))
            if client.spec.wants_prompt_logprobs
            else None
        )
        if delta.prompt_logprobs != (None if client.tokens else wanted):
            self._world.violate(
                "prompt logprobs come once", f"{client.spec.request_id}: {delta.prompt_logprobs}"
            )
        client.tokens += delta.token_ids
        if tuple(client.tokens) != client.expected[: len(client.tokens)]:
            self._world.violate("tokens are right", f"{client.spec.request_id}: {client.tokens}")
        return None if delta.finish is None else self._end(client, RequestEnd.DONE, None)

    def _end(self, client: Client, end: RequestEnd, error: BaseException | None) -> StreamEnded:
        name = client.spec.request_id
        if client.end is not None:
            self._world.violate("ends once", f"{name} ends as {client.end} and as {end}")
        client.end, client.error = end, str(error or "")
        self.ended[end] += 1
        self._world.log(self.name, f"{name} {end.value} {len(client.tokens)} {client.error}")
        if end is RequestEnd.DONE and tuple(client.tokens) != client.expected:
            self._world.violate("success is whole", f"{name}: {client.tokens}")
        return StreamEnded(client.request, error)

    def _check_output(self, worker: str, output: RequestOutput) -> None:
        """Checks that a worker's tokens are right, and follow the tokens from before the attempt."""
        sub_request, expected = self._sub_requests[output.request_id]
        end = output.first_position + len(output.token_ids)
        if output.token_ids != expected[output.first_position : end]:
            self._world.violate("tokens are right", f"{output.request_id} from {worker}: {output}")
        if output.token_ids and output.first_position < len(sub_request.output_token_ids):
            self._world.violate("nothing is computed twice", f"{worker}: {output}")
        self._check_times(worker, output)

    def _check_times(self, worker: str, output: RequestOutput) -> None:
        """Checks that a transfer's events are in order, and that its peer is another worker."""
        for transfer in output.stage_times.transfers if output.stage_times else ():
            times = [event.at_s for event in transfer.events]
            self._world.counts[f"transfer {transfer.events[-1].kind.value}"] += 1
            if times != sorted(times) or times[0] < 0.0 or transfer.peer == worker:
                self._world.violate("times are in order", f"{worker}: {transfer}")

    # how often each path was taken

    def _note_submit(self, worker: str, sub_request: EngineRequest) -> None:
        self._world.log(self.name, f"-> {worker} {sub_request.request_id}")
        client = self.clients[sub_request.request_id.rpartition(".")[0]]
        if sub_request.output_token_ids != tuple(client.tokens):
            self._world.violate("nothing is computed twice", f"{sub_request} behind {client.tokens}")
        prompt, max_tokens = sub_request.prompt_token_ids, sub_request.sampling_params.max_tokens
        self._sub_requests[sub_request.request_id] = (
            sub_request,
            answer(prompt, max_tokens, self._max_model_len),
        )
        self._world.counts["path resumed"] += bool(sub_request.output_token_ids)

    def _note_record(self, record: RequestRecord) -> None:
        if record.request_id in self.records:
            self._world.violate("every end is recorded once", record.request_id)
        self.records[record.request_id] = record
        counts = self._world.counts
        for attempt in record.attempts:
            counts[f"path attempt {min(attempt.number + 1, 4)} {attempt.placement.mode.value}"] += 1
            if attempt.failure is not None:
                counts["path attempt failed"] += 1
                counts[f"path {attempt.failure.cause.value}"] += 1
            if attempt.ended_at is None or attempt.open_workers:
                self._world.violate("every attempt is closed", f"{record.request_id}: {attempt}")
        if (finish := record.finish) is not None and record.attempts[-1].placement.prefill is not None:
            is_early = finish.reason is FinishReason.STOP and finish.num_completion_tokens == 1
            kind = "recomputed on decode" if finish.placement.is_fallback else "handed over"
            counts["path ended with token 0" if is_early else f"path {kind}"] += 1

    def _draw_id(self, _: int) -> str:
        self._num_ids += 1
        return f"{self._id_prefix}{self._num_ids}"


def brief(output: RequestOutput) -> str:
    """A short text for the log."""
    reason = output.finish_reason.value if output.finish_reason else ""
    return f"{output.first_position} {list(output.token_ids)} {reason}"
