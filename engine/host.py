"""EngineHost: composes everything one device process runs, whatever its role; knows no Ray and no cluster.

request plane thread   frames <-> messages, heartbeats            engine/request_plane.py
engine thread          admit, schedule, run, deliver              engine/loop.py, engine/core.py
transfer thread        KV blocks in and out, leases               kv_transfer/
"""

import os
import secrets
import socket
import time
from pathlib import Path

import torch

from baton.clock import SystemClock
from baton.config import BatonConfig, EngineConfig, SchedulerConfig
from baton.curve import ClusterKeys
from baton.errors import ConfigError
from baton.kv import WorkerRef
from baton.worker import WorkerEndpoint, WorkerState, WorkerStatus
from engine.allocator import available_memory, keep_freed_memory
from engine.core import EngineCore
from engine.grammar import GrammarCompiler
from engine.kv_cache import HostBlocks, KVPool
from engine.loader import LoadedModel, load_model
from engine.loop import EngineLoop
from engine.pipeline import make_pipeline
from engine.request_plane import RequestServer
from engine.role import Role
from engine.runner_parts import make_runner
from engine.step_trace import TraceHeader
from engine.step_trace_writer import StepTraceWriter, open_step_trace
from kv_transfer import KVConnectorScheduler, KVConnectorWorker, SharedMemory
from scheduler import Scheduler


class EngineHost:
    """One worker process. Every start is a new incarnation; nothing of an old one is ever taken up again."""

    def __init__(
        self, config: BatonConfig, keys: ClusterKeys, model_path: Path, role: Role, name: str
    ) -> None:
        """`keys` of both planes; none where `network.security` is `none`."""
        assert (keys.request is None) == (keys.kv is None) == (config.network.security == "none")
        self._config = config
        self._keys = keys
        self._model_path = model_path
        self._role = role
        self._name = name
        self._incarnation = secrets.token_hex(8)
        self._clock = SystemClock()

    def start(self) -> WorkerEndpoint:
        """Loads the model, binds both planes to free ports and begins to serve; blocks until it does."""
        keep_freed_memory()
        torch.set_num_threads(self._config.engine.num_threads or os.cpu_count() or 1)
        device = _device(self._config.engine)
        model = load_model(
            self._config.model,
            self._model_path,
            device,
            kv_cache_dtype=self._config.engine.kv_cache_dtype,
        )
        scheduler_config = _complete(self._config, model)
        assert scheduler_config.num_blocks is not None
        shape = model.kv_block_shape(scheduler_config.block_size)
        memory = _take_memory(scheduler_config.num_blocks * shape.size_bytes)
        pool = KVPool(scheduler_config.num_blocks, shape, device, memory.array)
        self._connector = KVConnectorWorker(
            self._config.kv_transfer,
            self._config.network.bind_host,
            self._keys.kv,
            self._incarnation,
            self._clock,
            pool.block_bytes(),
            pool.fingerprint(model.digest),
            on_news=lambda: self._loop.wake(),
            memory=memory,
            advertise_host=self._config.network.advertise_host,
        )
        self._server = RequestServer(
            self._config.network,
            self._keys.request,
            self._incarnation,
            self.status,
            self._clock,
        )
        core = self._make_core(scheduler_config, model, pool)
        self._loop = EngineLoop(core, self._role, self._server.send, self._clock)
        self._connector.start()
        self._loop.start()
        self._server.start(self._loop)
        return WorkerEndpoint(
            self._ref, self._role.kind, self._server.address, socket.gethostname(), os.getpid()
        )

    def _make_core(self, config: SchedulerConfig, model: LoadedModel, pool: KVPool) -> EngineCore:
        """Scheduler, device and grammars around the one KV pool."""
        host_blocks = HostBlocks(config.num_swap_blocks or 0, pool)
        grammars = GrammarCompiler(
            self._model_path, model.vocab_size, model.eos_token_ids, on_news=lambda: self._loop.wake()
        )
        runner = make_runner(model, pool, host_blocks, grammars)
        return EngineCore(
            Scheduler(config, KVConnectorScheduler(config.block_size)),
            make_pipeline(runner, async_scheduling=config.async_scheduling),
            self._connector,
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
        planes = {**self._connector.counters(), "request_denied_peers": self._server.num_denied}
        return WorkerStatus(
            self._ref,
            snapshot.role,
            state,
            snapshot.kv_blocks,
            snapshot.requests,
            {**snapshot.counters, **planes},
            snapshot.kv_peers,
        )

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for transfers, leases and streams to end; False if time ran out."""
        return self._loop.drain(timeout_s)

    def stop(self) -> None:
        """Ends all threads and closes all ports. Drain first, or what is running is lost."""
        self._loop.stop()
        self._server.stop()
        self._connector.shutdown()

    @property
    def _ref(self) -> WorkerRef:
        block_size = self._config.scheduler.block_size
        return WorkerRef(self._name, self._incarnation, (self._connector.kv_address,), block_size)


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda":
        raise ConfigError(
            "engine.device: got 'cuda', but hand-overs cannot read a GPU's memory yet; use 'cpu' for now"
        )
    return torch.device(config.device)


def _take_memory(num_bytes: int) -> SharedMemory:
    """Asks first what there is: Linux would rather end a process than refuse."""
    if num_bytes > available_memory():
        raise ConfigError(
            f"the KV pool wants {num_bytes / 2**20:,.0f} MiB, and {available_memory() / 2**20:,.0f} MiB are free; "
            "ask for less with engine.kv_cache_memory_mib or scheduler.num_blocks"
        )
    return SharedMemory(num_bytes)


def _complete(config: BatonConfig, model: LoadedModel) -> SchedulerConfig:
    """The scheduler's section with what only the model and the device know filled in."""
    asked = config.scheduler
    if asked.max_model_len is not None and asked.max_model_len > model.max_model_len:
        raise ConfigError(
            f"scheduler.max_model_len: got {asked.max_model_len}, but this model was made for {model.max_model_len}"
        )
    max_model_len = asked.max_model_len or model.max_model_len
    memory_mib = config.engine.kv_cache_memory_mib
    num_blocks = asked.num_blocks or model.kv_block_shape(asked.block_size).num_blocks_for(memory_mib * 2**20)
    if num_blocks < 2:
        raise ConfigError(
            f"engine.kv_cache_memory_mib: got {memory_mib}, which does not hold two blocks of this model"
        )
    return asked.with_values(
        "scheduler",
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        num_swap_blocks=_num_swap_blocks(config, model),
    )


def _num_swap_blocks(config: BatonConfig, model: LoadedModel) -> int | None:
    """Blocks of host memory for preempted requests; None if nothing would use them."""
    if config.scheduler.preemption == "recompute":
        return None
    memory_mib = config.engine.swap_space_mib
    shape = model.kv_block_shape(config.scheduler.block_size)
    num_blocks = config.scheduler.num_swap_blocks or shape.num_blocks_for(memory_mib * 2**20)
    if num_blocks < 1:
        raise ConfigError(
            f"engine.swap_space_mib: got {memory_mib}, which does not hold one block of this model"
        )
    return num_blocks
