"""Executor: computes a worker's steps and moves its KV blocks, on one device or on several ranks.

one rank       engine/build.py: model, KV pool, pipeline and connector, all in this process
several ranks  engine/ranks/processes.py: this process is rank 0, the others are its children
"""

from collections.abc import Callable
from pathlib import Path

from baton.clock import Clock
from baton.config import BatonConfig
from baton.system.curve import PlaneKeys
from engine.build import DeviceEngine, OnProgress, build_device_engine
from engine.collectives import SINGLE_RANK
from engine.grammars.compiler import GrammarCompiler
from engine.pipeline import Pipeline
from engine.ranks.processes import RankProcesses
from kv_transfer import BlockMover


class Executor:
    """All ranks of a worker, with the model loaded. Call `make_pipeline`, then `start`, finally `stop`."""

    def __init__(self, device_engine: DeviceEngine, others: RankProcesses | None) -> None:
        """Waits until the `others` have loaded the model. ConfigError, ModelError or ClusterError if one fails."""
        self.device_engine = device_engine
        """This process' device engine."""
        self._others = others
        loaded = others.join(device_engine.model.digest) if others else ()
        self.kv_addresses = (device_engine.connector.kv_address, *(rank.kv_address for rank in loaded))
        """The address of each rank's KV plane."""
        self.scheduler_config = device_engine.scheduler_config
        """The worker's scheduler configuration, with the number of blocks of the rank with the fewest
        blocks."""
        self.connector: BlockMover = device_engine.connector
        """The connector of all ranks."""
        if others:
            num_blocks = min([device_engine.num_blocks, *(rank.num_blocks for rank in loaded)])
            self.scheduler_config = self.scheduler_config.with_values("scheduler", num_blocks=num_blocks)
            self.connector = others.connector(device_engine.connector)

    def make_pipeline(self, grammars: GrammarCompiler) -> Pipeline:
        """Makes the pipeline that computes the worker's steps on every rank."""
        if self._others is None:
            return self.device_engine.make_pipeline(grammars)
        return self._others.pipeline(lambda: self.device_engine.make_pipeline(grammars))

    def start(self) -> None:
        """Starts the KV plane; from now on, `on_kv_output` is called. Blocks until every rank is ready; raises the same
        errors as `start_executor`.
        """
        self.device_engine.connector.start()
        if self._others is not None:
            self._others.serve()

    @property
    def has_lost_rank(self) -> bool:
        """Whether the worker failed because the process of another rank ended after `start`."""
        return self._others is not None and self._others.has_lost_rank

    def stop(self) -> None:
        """Closes the connector, started or not, and ends the processes of other ranks."""
        self.device_engine.connector.shutdown()
        if self._others is not None:
            self._others.stop()
        self.device_engine.free()


def start_executor(
    config: BatonConfig,
    num_ranks: int,
    kv_keys: PlaneKeys | None,
    model_path: Path,
    incarnation: str,
    clock: Clock,
    on_kv_output: Callable[[], None],
    on_progress: OnProgress,
) -> Executor:
    """Builds this process' device engine while other ranks build theirs; blocks until all have loaded the model.

    Raises ConfigError, ModelError or ClusterError if a rank fails, after all processes of other ranks have
    ended. `on_kv_output` runs on any thread, after `Executor.start`; `on_progress` reports rank 0's progress.
    """
    others = None
    if num_ranks > 1:
        others = RankProcesses(config, num_ranks, kv_keys, model_path, incarnation, on_kv_output)
    try:
        collectives = others.collectives if others else SINGLE_RANK
        device_engine = build_device_engine(
            config, kv_keys, model_path, incarnation, collectives, clock, on_kv_output, on_progress
        )
        return Executor(device_engine, others)
    except BaseException:
        if others is not None:
            others.stop()
        raise
