"""EngineHost: composes everything that one worker process runs, whatever its role; knows no Ray and no cluster.

request plane thread   frames <-> messages, heartbeats            worker/request_plane.py
engine thread          admit, schedule, run, deliver              worker/loop.py, worker/core.py
device thread          compute; only on a CPU, if asynchronous    engine/pipeline.py
transfer thread        KV blocks in and out, leases               kv_transfer/

With tensor parallelism, this process is rank 0, and starts a process for each other rank (engine/ranks/processes.py).
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from baton.clock import SystemClock
from baton.config import BatonConfig, SchedulerConfig
from baton.errors import ClusterError, FleetError, ModelError
from baton.kv import WorkerRef
from baton.system.addresses import listen_tcp
from baton.system.curve import ClusterKeys
from baton.system.progress import Progress
from baton.system.progress_watch import PACE_S, ProgressWatch
from baton.system.running_clock import RunningClock
from baton.worker import StartProgress, WorkerEndpoint, WorkerLoad, WorkerRole, WorkerState, WorkerStatus
from decode_worker import DecodeRole
from engine.device import device_memory
from engine.executor import Executor, start_executor
from engine.grammars.compiler import GrammarCompiler
from engine.lent_cpus import LendingPipeline, LentCpus
from engine.pipeline import Pipeline
from engine.prefill_steps import with_prefill_steps
from prefill_worker import PrefillRole
from scheduler import Scheduler
from worker.commands import CommandQueue
from worker.core import EngineCore
from worker.kv_connector_scheduler import KVConnectorScheduler
from worker.loop import EngineLoop, EngineSnapshot
from worker.metrics_server import MetricsServer
from worker.request_plane import RequestServer
from worker.role import Role
from worker.step_trace import TraceHeader
from worker.step_trace_writer import StepTraceWriter, open_step_trace

if TYPE_CHECKING:
    from worker.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

LEAST_STEP_LIMIT_S = {"cpu": 10.0, "cuda": 60.0}
"""By kind of device: no step has a shorter time limit than this. On a GPU, a step may have to compile a kernel."""


def log_progress(progress: StartProgress) -> None:
    """Logs a line when a stage begins, and one when it is done."""
    if progress.done in (1, progress.count):
        logger.info("%s: %d of %d", progress.what, progress.done, progress.count)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Everything that a started worker runs."""

    executor: Executor
    core: EngineCore
    loop: EngineLoop
    server: RequestServer
    watch: ProgressWatch
    metrics: MetricsServer | None


class EngineHost:
    """One worker process. Every start is a new incarnation, which shares nothing with an earlier one."""

    def __init__(
        self,
        config: BatonConfig,
        keys: ClusterKeys,
        model_path: Path,
        role: WorkerRole,
        name: str,
        cpus: tuple[int, ...] = (),
        lent_cpus: LentCpus | None = None,
    ) -> None:
        """As many requests may wait in the worker's queue as one gateway admits (`gateway.max_in_flight`).

        `keys`: the keys of the request plane and of the KV plane; both are None if `network.security` is `none`.
        `cpus`: the CPUs that this process is pinned to, for its status. `lent_cpus`: None if the worker neither lends
        nor borrows CPUs.
        """
        assert (keys.request is None) == (keys.kv is None) == (config.network.security == "none")
        self._config = config
        self._keys = keys
        self._model_path = model_path
        self._role = role
        """The role in which the worker starts; the loop knows the present role."""
        max_waiting = config.gateway.max_in_flight
        self._roles: dict[WorkerRole, Role] = {
            WorkerRole.PREFILL: PrefillRole(max_waiting),
            WorkerRole.DECODE: DecodeRole(max_waiting),
        }
        self._name = name
        self._incarnation = secrets.token_hex(8)
        self._cpus = cpus
        self._lent_cpus = lent_cpus
        self._clock = SystemClock()
        self._started: _Parts | None = None
        self._metrics: WorkerMetrics | None = None

    def start(self, on_progress: Callable[[StartProgress], None] = log_progress) -> WorkerEndpoint:
        """Loads the model, binds request plane and KV plane to free ports, and begins to serve; returns once it serves.

        `on_progress` is called on this thread, for stages that take long.
        """
        commands = CommandQueue()
        with ExitStack() as on_failure:
            if self._lent_cpus is not None:
                on_failure.callback(self._lent_cpus.close)
            config = self._config.for_worker(self._role)
            if self._role is WorkerRole.PREFILL:
                config = with_prefill_steps(config, self._model_path)
            executor = start_executor(
                config,
                self._config.num_ranks(self._role),
                self._keys.kv,
                self._model_path,
                self._incarnation,
                self._clock,
                on_kv_output=commands.wake,
                on_progress=lambda what, done, count: on_progress(StartProgress(what, done, count)),
            )
            on_failure.callback(executor.stop)
            metrics, metrics_address = self._open_metrics()
            if metrics is not None:
                on_failure.callback(metrics.stop)
            parts = self._started = self._compose(executor, commands, metrics, on_failure)
            on_failure.pop_all()
            on_failure.callback(self.stop)
            self._begin(parts)
            on_failure.pop_all()
        return WorkerEndpoint(
            ref=self._ref,
            role=self._role,
            request_address=parts.server.address,
            node=socket.gethostname(),
            pid=os.getpid(),
            metrics_address=metrics_address,
            num_threads=executor.device_engine.num_threads,
            cpus=self._cpus,
            quantization=executor.device_engine.model.quantization or "",
        )

    def _compose(
        self, executor: Executor, commands: CommandQueue, metrics: MetricsServer | None, on_failure: ExitStack
    ) -> _Parts:
        """Makes all parts of the worker: request plane > loop > core > scheduler, pipeline, connector, grammars."""
        model, config = executor.device_engine.model, executor.scheduler_config
        engine, clock = self._config.engine, self._clock
        running = RunningClock(clock, PACE_S)
        least_s = LEAST_STEP_LIMIT_S[engine.device]
        steps = Progress("its engine", running, engine.progress_timeout_s, least_s)
        grammars = GrammarCompiler(
            self._model_path, model.vocab_size, model.eos_token_ids, commands.wake, clock
        )
        core = EngineCore(
            Scheduler(
                config,
                KVConnectorScheduler(config.block_size, model.layer_groups.groups),
                self._keys.prefix,
                mixes_prompt_parts=engine.device != "cpu",
                num_speculative_tokens=self._config.speculation.num_drafts,
                kv_groups=model.layer_groups.groups,
            ),
            self._make_pipeline(executor, grammars),
            executor.connector,
            grammars,
            model.eos_token_ids,
            clock,
            self._open_trace(config),
            steps,
        )
        on_failure.callback(core.close)
        grammars.start()
        network = self._config.network
        server = RequestServer(network, self._keys.request, self._incarnation, self.status, clock)
        lease_s = self._config.kv_transfer.lease_s
        loop = EngineLoop(core, self._roles[self._role], server, clock, lease_s, commands)
        watched = steps, grammars.progress, server.progress, executor.device_engine.connector.progress
        watch = ProgressWatch(watched, clock, server.beat, on_look=running.look)
        return _Parts(executor, core, loop, server, watch, metrics)

    def _make_pipeline(self, executor: Executor, grammars: GrammarCompiler) -> Pipeline:
        pipeline = executor.make_pipeline(grammars)
        return pipeline if self._lent_cpus is None else LendingPipeline(pipeline, self._lent_cpus)

    def _begin(self, parts: _Parts) -> None:
        parts.executor.start()
        parts.watch.start()
        if (fault := parts.core.check_device()) is not None:
            if parts.executor.has_lost_rank:  # the next try may succeed
                raise ClusterError(f"{fault} before it served")
            raise ModelError(
                f"{self._model_path}: a step with one known token failed: {fault}; the model's weights or "
                "this device may be damaged"
            )
        parts.loop.start()
        parts.server.start(parts.loop)
        if parts.metrics is not None:
            parts.metrics.start()

    @property
    def _parts(self) -> _Parts:
        assert self._started is not None, "the worker was not started"
        return self._started

    def _open_metrics(self) -> tuple[MetricsServer | None, str]:
        """The server and its address; None and "" without `network.metrics_port`."""
        network = self._config.network
        if network.metrics_port is None:
            return None, ""
        listener, address = listen_tcp(
            network.bind_host, network.advertise_host, network.metrics_port, "network.metrics_port"
        )
        return MetricsServer(listener, self._render_metrics), address

    def _render_metrics(self, accept: str) -> tuple[bytes, str]:
        from worker.metrics import WorkerMetrics  # a slow import

        if self._metrics is None:
            device, lent_cpus = self._parts.executor.device_engine.model.device, self._lent_cpus
            self._metrics = WorkerMetrics(
                self.status,
                self._parts.core.steps,
                partial(device_memory, device),
                None if lent_cpus is None else lent_cpus.borrowed_s,
            )
        return self._metrics.render(accept)

    def _open_trace(self, config: SchedulerConfig) -> StepTraceWriter | None:
        """The file that this incarnation writes its steps to, if `engine.trace_dir` is set."""
        engine = self._config.engine
        if engine.trace_dir is None:
            return None
        assert config.num_blocks is not None
        header = TraceHeader(
            worker=self._name,
            incarnation=self._incarnation,
            role=self._role,
            began_unix_s=time.time(),
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_blocks=config.num_blocks - 1,
            block_size=config.block_size,
        )
        return open_step_trace(engine.trace_dir, header, self._clock, engine.trace_max_mib * 2**20)

    def status(self) -> WorkerStatus:
        """The engine's state after its last step. May be called from any thread, at any time after `start`."""
        snapshot = self._parts.loop.snapshot
        failure = self._parts.loop.failure
        if (hang := self._parts.watch.hang) is not None:
            state = WorkerState.HUNG
        elif not self._parts.loop.is_alive:
            state = WorkerState.STOPPED if failure is None else WorkerState.DEAD
        else:
            state = WorkerState.DRAINING if snapshot.is_draining else WorkerState.READY
        executor = self._parts.executor
        scheduler = executor.scheduler_config  # completed: defaults depend on the device
        # Read now, not in the snapshot: an idle engine takes no snapshots, but connections may still be refused.
        planes = {
            **executor.connector.counters(),
            "request_denied_peers": self._parts.server.num_denied,
        }
        return WorkerStatus(
            ref=self._ref,
            role=snapshot.role,
            state=state,
            kv_blocks=snapshot.kv_blocks,
            requests=snapshot.requests,
            counters={**snapshot.counters, **planes},
            kv_peers=executor.connector.peers(),
            failure=hang or ("" if failure is None else str(failure)),
            load=self._load(snapshot),
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            kv_groups=executor.device_engine.model.layer_groups.groups,
        )

    def _load(self, snapshot: EngineSnapshot) -> WorkerLoad:
        """The load in a snapshot, with the waiting time as of now: it also grows during a long step."""
        if snapshot.oldest_arrival is None:
            return snapshot.load
        return replace(snapshot.load, oldest_waiting_s=max(0.0, self._clock.now() - snapshot.oldest_arrival))

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests for good. Returns True if nothing was lost.

        Running requests have `timeout_s` to end; then they are given back to their gateways. Transfers and
        leases have `kv_transfer.lease_s` more. Raises FleetError while the worker changes its role.
        """
        return self._parts.loop.drain(timeout_s)

    def set_role(self, role: WorkerRole, timeout_s: float) -> None:
        """Leaves the current role as `drain` does, then serves in the other one. Returns once it serves.

        Weights and prefix cache stay. Does nothing if the worker already has that role. A FleetError says
        what prevented the change; then the worker keeps its old role.
        """
        if self._parts.loop.serves_as(role):
            return
        ours, theirs = self._config.num_ranks(self._role), self._config.num_ranks(role)
        if ours != theirs:
            raise FleetError(
                f"it has {ours} tensor-parallel ranks, but {role.value} workers have {theirs} "
                "(cluster.prefill_tensor_parallel, cluster.decode_tensor_parallel); a worker cannot "
                "change its number of ranks"
            )
        self._parts.loop.set_role(self._roles[role], timeout_s)

    def flush_cache(self, timeout_s: float, *, force: bool) -> None:
        """Empties the prefix cache between two steps.

        Raises FleetError if blocks are in use, or if no step ends within `timeout_s`. With `force`, running
        requests give up their blocks and compute again. Blocks that other workers read or write stay until
        they are done.
        """
        self._parts.loop.flush_cache(timeout_s, force=force)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Calls `callback`, on some thread, once the worker has ended by itself or was stopped (see `status`)."""
        self._parts.loop.when_ended(callback)

    def stop(self) -> None:
        """Ends all threads, closes all ports and notifies gateways. Drain first, or requests are lost."""
        parts = self._parts
        if parts.metrics is not None:
            parts.metrics.stop()
        parts.loop.stop()
        parts.server.stop()
        parts.executor.stop()
        if self._lent_cpus is not None:
            self._lent_cpus.close()
        parts.watch.stop()

    @property
    def _ref(self) -> WorkerRef:
        executor = self._parts.executor
        block_size = executor.scheduler_config.block_size
        return WorkerRef(self._name, self._incarnation, executor.kv_addresses, block_size)
