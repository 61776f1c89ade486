"""EngineHost: composes everything one device process runs, whatever its role; knows no Ray and no cluster.

request plane thread   frames <-> messages, heartbeats            worker/request_plane.py
engine thread          admit, schedule, run, deliver              worker/loop.py, worker/core.py
transfer thread        KV blocks in and out, leases               kv_transfer/

With tensor parallelism this process is rank 0, and starts one for each other rank: engine/ranks/start.py.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from baton.clock import SystemClock
from baton.config import BatonConfig, SchedulerConfig
from baton.errors import FleetError
from baton.kv import WorkerRef
from baton.system.addresses import listen_tcp
from baton.system.curve import ClusterKeys
from baton.worker import StartProgress, WorkerEndpoint, WorkerLoad, WorkerRole, WorkerState, WorkerStatus
from engine.device import device_memory
from engine.grammars.compiler import GrammarCompiler
from engine.ranks.start import start_ranks
from scheduler import Scheduler
from worker.core import EngineCore
from worker.kv_connector import KVConnectorScheduler
from worker.loop import EngineLoop, EngineSnapshot
from worker.metrics_server import MetricsServer
from worker.request_plane import RequestServer
from worker.role import Role
from worker.step_trace import TraceHeader
from worker.step_trace_writer import StepTraceWriter, open_step_trace

if TYPE_CHECKING:
    from worker.metrics import WorkerMetrics

logger = logging.getLogger(__name__)


def log_progress(progress: StartProgress) -> None:
    """A line when something begins, and one when it is done."""
    if progress.done in (1, progress.count):
        logger.info("%s: %d of %d", progress.what, progress.done, progress.count)


class EngineHost:
    """One worker process. Every start is a new incarnation; nothing of an old one is ever taken up again."""

    def __init__(
        self,
        config: BatonConfig,
        keys: ClusterKeys,
        model_path: Path,
        role: Role,
        name: str,
        other_roles: Sequence[Role] = (),
    ) -> None:
        """`keys` of both planes; none where `network.security` is `none`. `other_roles`: what it may become."""
        assert (keys.request is None) == (keys.kv is None) == (config.network.security == "none")
        self._config = config
        self._keys = keys
        self._model_path = model_path
        self._role = role
        """What it starts as; the loop knows what it is."""
        self._roles = {each.kind: each for each in (role, *other_roles)}
        self._name = name
        self._incarnation = secrets.token_hex(8)
        self._clock = SystemClock()
        self._metrics_server: MetricsServer | None = None
        self._metrics: WorkerMetrics | None = None

    def start(self, on_progress: Callable[[StartProgress], None] = log_progress) -> WorkerEndpoint:
        """Loads the model, binds both planes to free ports and begins to serve; blocks until it does.

        `on_progress` hears, on this thread, of whatever takes long.
        """
        self._ranks = start_ranks(
            self._config,
            self._config.num_ranks(self._role.kind),
            self._keys.kv,
            self._model_path,
            self._incarnation,
            self._clock,
            on_news=lambda: self._loop.wake(),
            on_progress=lambda what, done, count: on_progress(StartProgress(what, done, count)),
        )
        try:
            return self._serve()
        except BaseException:
            if self._metrics_server is not None:
                self._metrics_server.stop()
            self._ranks.stop()
            raise

    def _serve(self) -> WorkerEndpoint:
        self._server = RequestServer(
            self._config.network,
            self._keys.request,
            self._incarnation,
            self.status,
            self._clock,
        )
        lease_s = self._config.kv_transfer.lease_s
        metrics_address = self._open_metrics()
        core = self._make_core()
        self._steps = core.steps
        self._loop = EngineLoop(core, self._role, self._server, self._clock, lease_s)
        self._ranks.start()
        self._loop.start()
        self._server.start(self._loop)
        if self._metrics_server is not None:
            self._metrics_server.start()
        return WorkerEndpoint(
            self._ref,
            self._role.kind,
            self._server.address,
            socket.gethostname(),
            os.getpid(),
            metrics_address,
        )

    def _open_metrics(self) -> str:
        """Where they will be read; empty if nowhere."""
        network = self._config.network
        if network.metrics_port is None:
            return ""
        listener, address = listen_tcp(
            network.bind_host, network.advertise_host, network.metrics_port, "network.metrics_port"
        )
        self._metrics_server = MetricsServer(listener, self._render_metrics)
        return address

    def _render_metrics(self, accept: str) -> tuple[bytes, str]:
        from worker.metrics import WorkerMetrics  # its library takes long to import, and nobody may ever ask

        if self._metrics is None:
            device = self._ranks.parts.model.device
            self._metrics = WorkerMetrics(self.status, self._steps, partial(device_memory, device))
        return self._metrics.render(accept)

    def _make_core(self) -> EngineCore:
        """Scheduler and grammars around the ranks."""
        model, config = self._ranks.parts.model, self._ranks.scheduler_config
        grammars = GrammarCompiler(
            self._model_path, model.vocab_size, model.eos_token_ids, on_news=lambda: self._loop.wake()
        )
        return EngineCore(
            Scheduler(config, KVConnectorScheduler(config.block_size), self._keys.prefix),
            self._ranks.make_pipeline(grammars),
            self._ranks.connector,
            grammars,
            model.eos_token_ids,
            self._clock,
            self._open_trace(config),
        )

    def _open_trace(self, config: SchedulerConfig) -> StepTraceWriter | None:
        """The file that this life of the worker writes its steps to, if it is to write any."""
        engine = self._config.engine
        if engine.trace_dir is None:
            return None
        assert config.num_blocks is not None
        header = TraceHeader(
            worker=self._name,
            incarnation=self._incarnation,
            role=self._role.kind,
            began_unix_s=time.time(),
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_blocks=config.num_blocks - 1,
            block_size=config.block_size,
        )
        return open_step_trace(engine.trace_dir, header, self._clock, engine.trace_max_mib * 2**20)

    def status(self) -> WorkerStatus:
        """How the engine stood after its last step; from any thread, at any time after `start`."""
        snapshot = self._loop.snapshot
        if not self._loop.is_alive:
            state = WorkerState.STOPPED if self._loop.failure is None else WorkerState.DEAD
        else:
            state = WorkerState.DRAINING if snapshot.is_draining else WorkerState.READY
        # The planes' counters are read anew: an idle engine takes no snapshots, and strangers may knock all the same.
        planes = {**self._ranks.connector.counters(), "request_denied_peers": self._server.num_denied}
        return WorkerStatus(
            self._ref,
            snapshot.role,
            state,
            snapshot.kv_blocks,
            snapshot.requests,
            {**snapshot.counters, **planes},
            self._ranks.connector.peers(),
            "" if self._loop.failure is None else str(self._loop.failure),
            self._load(snapshot),
        )

    def _load(self, snapshot: EngineSnapshot) -> WorkerLoad:
        """Whoever waits does so during a long step, too."""
        if snapshot.oldest_arrival is None:
            return snapshot.load
        return replace(snapshot.load, oldest_waiting_s=self._clock.now() - snapshot.oldest_arrival)

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests from now on, for good. Running ones have `timeout_s` to end, then they are given back to
        their gateways; transfers and leases have `kv_transfer.lease_s` more. True if nobody lost anything.

        FleetError while the worker changes its role.
        """
        return self._loop.drain(timeout_s)

    def set_role(self, role: WorkerRole, timeout_s: float) -> None:
        """Leaves the present role as `drain` does, then serves in the other one, with weights and prefix cache as they
        are; nothing happens if it has that role. Blocks until it serves.

        FleetError says what was in the way, and not whose; then it serves in its old role.
        """
        if self._loop.is_settled_as(role):
            return
        if role not in self._roles:
            raise FleetError(f"it was not built to become a {role.value} worker")
        ours, theirs = self._config.num_ranks(self._role.kind), self._config.num_ranks(role)
        if ours != theirs:
            raise FleetError(
                f"it has {ours} tensor-parallel ranks, and {role.value} workers have {theirs} "
                "(cluster.prefill_tensor_parallel, cluster.decode_tensor_parallel); a worker keeps its ranks for life"
            )
        self._loop.set_role(self._roles[role], timeout_s)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Calls it, on some thread, once the worker has ended by itself or was stopped; `status` says which."""
        self._loop.when_ended(callback)

    def stop(self) -> None:
        """Ends all threads and closes all ports; gateways are told. Drain first, or what is running is lost."""
        if self._metrics_server is not None:
            self._metrics_server.stop()
        self._loop.stop()
        self._server.stop()
        self._ranks.stop()

    @property
    def _ref(self) -> WorkerRef:
        block_size = self._ranks.scheduler_config.block_size
        return WorkerRef(self._name, self._incarnation, self._ranks.kv_addresses, block_size)
