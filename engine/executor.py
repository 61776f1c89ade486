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
        """This process' device engine."""
        ...

    @property
    def kv_addresses(self) -> tuple[str, ...]:
        """The address of each rank's KV plane."""
        ...

    @property
    def connector(self) -> ConnectorWorker:
        """The connector of all ranks."""
        ...

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The worker's, with the number of blocks of the rank that has fewest."""
        ...

    def make_pipeline(self, grammars: GrammarCompiler) -> Pipeline:
        """Makes the pipeline that computes the worker's steps on every rank."""
        ...

    def start(self) -> None:
        """Begins to move KV and to call `on_news`; blocks until every rank is ready. Raises like `start_executor`."""
        ...

    def stop(self) -> None:
        """Stops the connector if it was started, and ends the processes of other ranks."""
        ...


class SingleExecutor:
    """One device, in this process."""

    def __init__(self, device_engine: DeviceEngine) -> None:
        self.device_engine = device_engine
        self.kv_addresses: tuple[str, ...] = (device_engine.connector.kv_address,)
        self.connector: ConnectorWorker = device_engine.connector
        self.scheduler_config = device_engine.scheduler_config
        self._is_started = False

    def make_pipeline(self, grammars: GrammarCompiler) -> Pipeline:
        return self.device_engine.make_pipeline(grammars)

    def start(self) -> None:
        self._is_started = True
        self.device_engine.connector.start()

    def stop(self) -> None:
        if self._is_started:
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
    """Loads the model on every rank, in parallel; blocks until all have loaded it.

    Raises ConfigError, ModelError or ClusterError if a rank fails; then no process is left. `on_news` is called from
    any thread, after `Executor.start`; `on_progress` reports rank 0's progress.
    """
    if num_ranks > 1:
        from engine.ranks.executor import start_ranks

        return start_ranks(config, num_ranks, kv_keys, model_path, incarnation, clock, on_news, on_progress)
    return SingleExecutor(
        build_device_engine(
            config, kv_keys, model_path, incarnation, SingleRank(), clock, on_news, on_progress
        )
    )
