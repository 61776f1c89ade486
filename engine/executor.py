"""Executor: computes a worker's steps and moves its KV blocks, on one device or on several ranks.

one rank       engine/build.py: model, KV pool, pipeline and connector, all in this process
several ranks  engine/ranks/processes.py: this process is rank 0, the others are its children
"""

from collections.abc import Callable

from engine.build import DeviceEngine
from engine.collectives import SINGLE_RANK, Collectives
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


def start_executor(build: Callable[[Collectives], DeviceEngine], others: RankProcesses | None) -> Executor:
    """Builds this process' device engine while the `others` build theirs; blocks until all have loaded the model.

    Raises ConfigError, ModelError or ClusterError if a rank fails, after all processes of other ranks have
    ended.
    """
    try:
        return Executor(build(others.collectives if others else SINGLE_RANK), others)
    except BaseException:
        if others is not None:
            others.stop()
        raise
