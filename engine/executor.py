"""Executor: what computes a worker's steps and moves its KV blocks: one device in this process, or several ranks.

one rank       engine/build.py: model, KV pool, pipeline and connector, all in this process
several ranks  engine/ranks/executor.py: this process is rank 0, the others are its children
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from baton.clock import Clock
from baton.config import BatonConfig, SchedulerConfig
from baton.system.curve import PlaneKeys
from engine.build import DeviceEngine, OnProgress, build_device_engine
from engine.collectives import SingleRank
from engine.connector import ConnectorWorker
from engine.grammars.compiler import GrammarCompiler
from engine.pipeline import Pipeline


class Executor(Protocol):
    """The model is loaded. `make_pipeline` and `start` follow, and `stop` in the end."""

    @property
    def device_engine(self) -> DeviceEngine:
        """That of this process."""
        ...

    @property
    def kv_addresses(self) -> tuple[str, ...]:
        """Where the KV plane of each rank listens."""
        ...

    @property
    def connector(self) -> ConnectorWorker:
        """Of all ranks."""
        ...

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The worker's: with as many blocks as the rank that has fewest."""
        ...

    def make_pipeline(self, grammars: GrammarCompiler) -> Pipeline:
        """Where the worker's steps are computed, on every rank."""
        ...

    def start(self) -> None:
        """Begins to move KV and to report news; blocks until every rank is ready. Raises as `start_executor`."""
        ...

    def stop(self) -> None:
        """Closes the connector, started or not, and ends the processes of other ranks."""
        ...


class SingleExecutor:
    """One device, in this process."""

    def __init__(self, device_engine: DeviceEngine) -> None:
        self.device_engine = device_engine
        self.kv_addresses: tuple[str, ...] = (device_engine.connector.kv_address,)
        self.connector: ConnectorWorker = device_engine.connector
        self.scheduler_config = device_engine.scheduler_config

    def make_pipeline(self, grammars: GrammarCompiler) -> Pipeline:
        return self.device_engine.make_pipeline(grammars)

    def start(self) -> None:
        self.device_engine.connector.start()

    def stop(self) -> None:
        self.device_engine.connector.shutdown()
        self.device_engine.free()


def start_executor(
    config: BatonConfig,
    num_ranks: int,
    kv_keys: PlaneKeys | None,
    model_path: Path,
    incarnation: str,
    clock: Clock,
    on_news: Callable[[], None],
    on_progress: OnProgress,
) -> Executor:
    """Loads the model on every rank, in parallel; blocks until all of them have it.

    ConfigError, ModelError or ClusterError if they cannot; no process is left then. `on_news` is called from any
    thread, after `Executor.start`; `on_progress` reports how far rank 0 is.
    """
    if num_ranks > 1:
        from engine.ranks.executor import start_ranks

        return start_ranks(config, num_ranks, kv_keys, model_path, incarnation, clock, on_news, on_progress)
    return SingleExecutor(
        build_device_engine(
            config, kv_keys, model_path, incarnation, SingleRank(), clock, on_news, on_progress
        )
    )
