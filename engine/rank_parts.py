"""build_rank: one tensor-parallel rank of a worker, its part of the model, its KV pool and its connector, from the
configuration; knows no process and no other rank.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.clock import Clock
from baton.config import BatonConfig, EngineConfig, SchedulerConfig
from baton.curve import PlaneKeys
from baton.errors import ConfigError
from engine.allocator import available_memory, keep_freed_memory
from engine.collectives import Collectives
from engine.fail_stop import FailStop
from engine.grammar import GrammarCompiler
from engine.kv_cache import HostBlocks, KVPool
from engine.loader import LoadedModel, load_model
from engine.pipeline import Pipeline, make_pipeline
from engine.runner_parts import make_runner
from kv_transfer import KVConnectorWorker, SharedMemory


@dataclass(frozen=True, slots=True)
class RankParts:
    """What every rank of a worker has."""

    collectives: Collectives
    model: LoadedModel
    scheduler_config: SchedulerConfig
    """Complete: the same on every rank."""
    pool: KVPool
    connector: KVConnectorWorker
    """Not started yet."""

    def make_pipeline(self, grammars: GrammarCompiler | None = None) -> Pipeline:
        """Where the rank computes its steps. The collectives are connected, and every rank calls this at the same time.

        `grammars`: for the rank that samples, rank 0.
        """
        host_blocks = HostBlocks(self.scheduler_config.num_swap_blocks or 0, self.pool)
        runner = make_runner(self.model, self.pool, host_blocks, grammars, self.collectives)
        steps = runner if self.collectives.size == 1 else FailStop(runner)
        return make_pipeline(steps, async_scheduling=self.scheduler_config.async_scheduling)


def build_rank(
    config: BatonConfig,
    kv_keys: PlaneKeys | None,
    model_path: Path,
    incarnation: str,
    collectives: Collectives,
    clock: Clock,
    on_news: Callable[[], None],
) -> RankParts:
    """Loads the rank's part of the model and binds its KV plane. ConfigError or ModelError for what cannot be served.

    `incarnation` is the worker's; `on_news` is called from the transfer thread. The collectives need not be connected.
    """
    keep_freed_memory()
    torch.set_num_threads(config.engine.num_threads or max(1, (os.cpu_count() or 1) // collectives.size))
    device = rank_device(config.engine)
    model = load_model(
        config.model,
        model_path,
        device,
        kv_cache_dtype=config.engine.kv_cache_dtype,
        collectives=collectives,
    )
    scheduler_config = _complete(config, model)
    assert scheduler_config.num_blocks is not None
    shape = model.kv_block_shape(scheduler_config.block_size)
    memory = _take_memory(scheduler_config.num_blocks * shape.size_bytes)
    pool = KVPool(scheduler_config.num_blocks, shape, device, memory.array)
    connector = KVConnectorWorker(
        config.kv_transfer,
        config.network.bind_host,
        kv_keys,
        incarnation,
        clock,
        pool.block_bytes(),
        pool.fingerprint(model.digest, collectives.size),
        on_news=on_news,
        rank=collectives.rank,
        memory=memory,
        advertise_host=config.network.advertise_host,
    )
    return RankParts(collectives, model, scheduler_config, pool, connector)


def rank_device(config: EngineConfig) -> torch.device:
    """What a rank computes on."""
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
