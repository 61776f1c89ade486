"""Worker: one incarnation of a worker on virtual time.

Real: engine core, scheduler, the requests of each client, the scheduler's half of the connector, endpoint, role,
sessions. Replaced: the loop's thread (worker/loop.py), the request plane's thread, the connector's other half
(SimConnector), and the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.clock import Clock
from baton.config import KVTransferConfig, SchedulerConfig
from baton.errors import Overloaded, RequestError, WireError
from baton.kv import KVFingerprint, WorkerRef
from baton.kv_groups import ONE_GROUP, KVGroups
from baton.messages.request_plane import AbortRequests, Heartbeat, Hello, RunSuspect, SubmitRequest
from baton.messages.session import WorkerSessions
from baton.request import EngineRequest, RequestOutput
from baton.sampling import StructuredOutput
from baton.step import ClientOutputs
from baton.system.progress import Progress
from baton.worker import WorkerRole, WorkerState, WorkerStatus
from decode_worker import DecodeRole
from engine.grammars.compiler import CompiledGrammar, GrammarCompiler
from engine.pipeline import Pipeline, StreamPipeline
from kv_transfer.pool import KVBytes
from kv_transfer.protocol.transports import ZMQ_TCP
from kv_transfer.transport.base import Bytes
from prefill_worker import PrefillRole
from scheduler import Scheduler
from simulator.connector import SimConnector
from simulator.device import CELL_BYTES, NUM_HEADS, NUM_PLANES, AsyncDevice, SimRunner, SlowRunner
from simulator.model import EOS
from simulator.network import Network, SimChannel
from simulator.pools import SharedPools, SimExits, SimReader
from simulator.world import Process, World
from worker.client_requests import ClientRequests, last_output, refusal
from worker.core import EngineCore
from worker.kv_connector_scheduler import KVConnectorScheduler
from worker.role import Role
from worker.suspect_turns import SuspectTurns

MAX_WAKE_DELAY_S = 0.001
PROGRESS_TIMEOUT_S = 2.0
"""Longer than any step, even of a slow worker."""

Outbox = Callable[["Worker", list[RequestOutput]], None]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The settings of one worker, which are the same for all its incarnations."""

    name: str
    role: WorkerRole
    scheduler: SchedulerConfig
    host: str
    transports: tuple[str, ...]
    window_bytes: int
    model: str
    step_s: tuple[float, float]
    max_command_delay_s: float
    max_waiting: int
    clock_offset_s: float
    reads_at_once: bool
    num_drafts: int = 0
    """The most drafts of a request in one step."""
    groups: KVGroups = ONE_GROUP
    """The KV groups of the model's layers."""


@dataclass(frozen=True, slots=True)
class Site:
    """What all workers share."""

    world: World
    transfer: KVTransferConfig
    network: Network
    pools: SharedPools
    may_damage_reads: bool
    """Whether reads may be damaged. They may only if all transfers have checksums, so that damage is noticed."""


class Worker(Process):
    """One incarnation, from its start until it is killed. Only events change its state."""

    def __init__(
        self,
        site: Site,
        spec: WorkerSpec,
        number: int,
        outboxes: Mapping[str, Outbox],
        beat: Callable[["Worker"], None],
    ) -> None:
        """`outboxes`: those of the gateways, by gateway name. `beat` sends a heartbeat to all gateways."""
        world = site.world
        self.spec = spec
        self.name = spec.name
        self.incarnation = f"{spec.name}-incarnation-{number}"
        self.is_decode = spec.role is WorkerRole.DECODE
        self.clock = world.clock(spec.clock_offset_s)
        self._world = world
        self._outboxes = outboxes
        self._beat = beat
        self._commands: list[Callable[[], object]] = []
        self._engine_timer: float | None = None
        self.num_turns = 0
        self.is_draining = False
        self.hangs = False
        """If set, the device's next step never ends; the other threads continue."""
        self.slowness = 1
        """Steps take this many times as long."""
        self.sessions = WorkerSessions(self.incarnation)
        config = spec.scheduler
        assert config.num_blocks is not None
        shape = (config.num_blocks, NUM_PLANES, NUM_HEADS, config.block_size, CELL_BYTES)
        # Memory that was never written holds no KV.
        self._pool: Bytes = np.full(shape, world.rng.randrange(256), np.uint8)
        self.runner = SimRunner(
            world,
            self.incarnation,
            self._pool,
            config.num_swap_blocks or 0,
            self._step_duration_s,
            spec.num_drafts,
            spec.groups,
        )
        self.connector = SimConnector(world, self, self.clock, self.wake)
        self.connector.max_command_delay_s = spec.max_command_delay_s
        self.runner.blocks_to_load = lambda: set().union(*self.connector.blocks_to_write().values())
        self.channel = SimChannel(site.network, spec.name, self)
        self.readers = self._make_readers(site)
        self._attach_endpoint(site)
        self.connector_scheduler = KVConnectorScheduler(config.block_size, spec.groups)
        self.scheduler = Scheduler(
            config,
            self.connector_scheduler,
            hash_key=b"simulated" + b"-" * 16,
            num_speculative_tokens=spec.num_drafts,
            kv_groups=spec.groups,
        )
        self.core = EngineCore(
            self.scheduler,
            self._make_pipeline(),
            self.connector,
            InstantGrammars(self.clock, self.wake),
            (EOS,),
            self.clock,
            progress=Progress("its engine", self.clock, PROGRESS_TIMEOUT_S),
        )
        self.requests = ClientRequests(self.core, self.clock)
        self.suspects = SuspectTurns()
        self.role: Role = DecodeRole(spec.max_waiting) if self.is_decode else PrefillRole(spec.max_waiting)
        self.ref = WorkerRef(spec.name, self.incarnation, (self.channel.address,), config.block_size)

    @property
    def kind(self) -> WorkerRole:
        return self.role.kind

    # messages of the request plane

    def on_hello(self, gateway: str, hello: Hello) -> None:
        if self.sessions.on_hello(gateway.encode(), hello, self._world.now):
            self._world.counts["path command missed"] += 1
            self.abort_client(gateway)

    def heartbeat(self, gateway: str) -> Heartbeat:
        blocks, requests = self.scheduler.kv_block_counts(), self.scheduler.request_counts()
        state = WorkerState.DRAINING if self.is_draining else WorkerState.READY
        scheduler = self.spec.scheduler
        status = WorkerStatus(
            *(self.ref, self.kind, state, blocks, requests, {}),
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            kv_groups=self.spec.groups,
            suspects=self.suspects.running(),
            takes_suspects=self.suspects.is_free(self._world.now),
        )
        return self.sessions.heartbeat(gateway.encode(), status)

    def on_command(self, gateway: str, command: SubmitRequest | RunSuspect | AbortRequests) -> None:
        """Handles a message that is not a Hello, as RequestServer._receive does."""
        try:
            self.sessions.count_command(gateway.encode(), command)
        except WireError:
            self._world.counts["path command of another session"] += 1
            return
        match command:
            case SubmitRequest(request) if request.is_suspect:
                if refused := self.suspects.begin(gateway, request, self._world.now):
                    self._world.counts["path suspect refused"] += 1
                    self.requests.decline(request)
                    self._send(gateway, [refused])
                else:
                    self._beat(self)
            case SubmitRequest(request):
                self.submit(gateway, request)
            case RunSuspect(request_id):
                if suspect := self.suspects.release(gateway, request_id):
                    self.submit(gateway, suspect)
            case AbortRequests(request_ids):
                if dropped := self._drop_suspects(gateway, request_ids):
                    self._send(gateway, [last_output(suspect) for suspect in dropped])
                self.abort(gateway, request_ids)

    def lose_gateway(self, gateway: str) -> None:
        """Ends the session of a gateway that is unreachable, or was silent for too long."""
        if self.sessions.end(gateway.encode()):
            self._world.counts["path gateway lost"] += 1
            self.abort_client(gateway)

    def submit(self, gateway: str, request: EngineRequest) -> None:
        self._post_command(lambda: self._admit(gateway, request))

    def abort(self, gateway: str, request_ids: tuple[str, ...]) -> None:
        self._post_command(lambda: self._deliver(self.requests.abort(gateway, request_ids)))

    def abort_client(self, gateway: str) -> None:
        """Ends the requests of a gateway whose session is over."""
        self._drop_suspects(gateway)
        self._post_command(lambda: self._deliver(self.requests.abort_client(gateway)))

    def give_back(self) -> None:
        """Gives back every request that has not ended."""
        self._post_command(lambda: self._deliver(self.core.give_back_requests("it is told to")))

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache, which preempts every running request."""
        self._post_command(lambda: self.scheduler.reset_prefix_cache(force=True))

    def _post_command(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self.wake()

    def wake(self) -> None:
        self._run_engine_at(self._world.now + self._world.between(0.0, MAX_WAKE_DELAY_S))

    # the engine's thread

    def _run_engine_at(self, when: float) -> None:
        if self._engine_timer is None or when < self._engine_timer:
            self._engine_timer = when
            self._world.at(when, lambda: self._engine_turn(when), self, is_plane=False)

    def _engine_turn(self, when: float) -> None:
        if self._engine_timer != when:
            return
        self._engine_timer = None
        self.core.progress.begin()
        if self.hangs:
            return
        commands, self._commands = self._commands, []
        for command in commands:
            command()
        self._end_overdue()
        self._deliver(self.core.step())
        self._drain_if_unfit()
        self.core.progress.end()
        self.num_turns += 1
        self._world.counts["engine steps"] += 1
        if self.core.may_progress:
            self._run_engine_at(self._world.now)
        elif (deadline := self.requests.next_deadline()) is not None:
            self._run_engine_at(self._world.now + max(0.0, deadline - self.clock.now()))

    @property
    def is_unfit(self) -> bool:
        return self.core.health.unfit_reason is not None

    def _drain_if_unfit(self) -> None:
        """Gives all requests back, as worker/loop.py does. The fault injection then ends the worker."""
        if self.is_unfit and not self.is_draining:
            self._world.counts["path unfit"] += 1
            self.is_draining = True
            self._deliver(self.core.give_back_requests("its device is at fault"))

    def _admit(self, gateway: str, request: EngineRequest) -> None:
        try:
            if self.is_draining:
                raise Overloaded("it drains", 1.0)
            self.requests.admit(gateway, request, self.role)
        except RequestError as error:
            self._world.counts[f"path {type(error).__name__}"] += 1
            self.requests.decline(request)
            self._send(gateway, [refusal(request.request_id, error)])

    def _end_overdue(self) -> None:
        if ended := self.requests.end_overdue():
            self._world.counts["path deadline passed"] += 1
            self._deliver(ended)

    def _deliver(self, produced: ClientOutputs) -> None:
        if self.is_dead:  # it died in this step
            return
        for gateway, outputs in produced.items():
            for output in outputs:
                if output.finish_reason is not None and output.request_id not in self.requests.request_ids:
                    self._world.violate("ends once", f"{self.incarnation}: {output.request_id} ends again")
                self.requests.forget_ended([output])
            self._send(gateway, outputs)

    def _send(self, gateway: str, outputs: list[RequestOutput]) -> None:
        """Sends outputs, as RequestServer does."""
        self._outboxes[gateway](self, outputs)
        if self.suspects.end_turns(outputs, self._world.now):
            self._beat(self)

    def _drop_suspects(self, gateway: str, request_ids: tuple[str, ...] | None = None) -> list[EngineRequest]:
        dropped = self.suspects.drop(gateway, request_ids, self._world.now)
        for suspect in dropped:
            self.requests.decline(suspect)
        if dropped:
            self._world.counts["path held suspect dropped"] += 1
            self._beat(self)
        return dropped

    def _step_duration_s(self) -> float:
        return self.slowness * self._world.between(*self.spec.step_s)

    # composition, as worker/host.py does it

    def _make_pipeline(self) -> Pipeline:
        if self.spec.scheduler.async_scheduling:
            return AsyncDevice(self._world, self.runner, self)
        return StreamPipeline(SlowRunner(self._world, self.runner), is_async=False)

    def _make_readers(self, site: Site) -> dict[str, SimReader]:
        return {
            name: SimReader(
                name,
                site.pools,
                self.incarnation,
                self._pool.reshape(len(self._pool), -1),
                self,
                lambda: self.connector.wake_up(),
                is_instant=self.spec.reads_at_once,
                may_damage=site.may_damage_reads,
            )
            for name in self.spec.transports
            if name != ZMQ_TCP
        }

    def _attach_endpoint(self, site: Site) -> None:
        spec, groups = self.spec, self.spec.groups
        fingerprint = KVFingerprint(
            protocol_version=2,
            model=spec.model,
            dtype="float32",
            layout="LKHTD",
            num_layers=NUM_PLANES // 2 * groups.num_groups,
            num_kv_heads=NUM_HEADS,
            head_dim=CELL_BYTES // 4,
            block_size=spec.scheduler.block_size,
            num_ranks=1,
            groups=groups,
        )
        self.connector.attach(
            site.transfer,
            self.incarnation,
            KVBytes(self._pool.reshape(len(self._pool), -1), fingerprint),
            self.channel,
            self.readers,
            spec.host,
            spec.transports,
        )
        endpoint = self.connector.endpoint
        # The configuration counts in MiB, and a pool of this size would never fill a window.
        endpoint._producer_end._producer._window._max_bytes = spec.window_bytes
        endpoint._consumer_end._pools._exits = SimExits(site.pools, lambda: self.connector.wake_up())


class InstantGrammars(GrammarCompiler):
    """Compiles nothing: the device knows which tokens are forced."""

    def __init__(self, clock: Clock, on_compiled: Callable[[], None]) -> None:
        super().__init__(Path("no model"), 100_000, (EOS,), on_compiled, clock)

    def compile(self, output: StructuredOutput, caller: int = 0) -> None:
        self._done.put(CompiledGrammar(output))
        self._on_compiled()
