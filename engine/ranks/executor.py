"""RankedExecutor: a worker's tensor-parallel ranks as one pipeline and one connector; this process is rank 0.

process of rank 0    scheduler, engine loop, request plane; its part of the model       worker/host.py
process of rank r    its part of the model, the same steps; its own device, KV pool     engine/ranks/process.py
                     and transfer thread
"""

import os
from collections.abc import Callable
from pathlib import Path

from baton.clock import Clock
from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.system.curve import PlaneKeys
from engine.build import DeviceEngine, OnProgress, build_device_engine
from engine.collectives import TorchCollectives
from engine.connector import ConnectorWorker
from engine.device import rank_device
from engine.grammars.compiler import GrammarCompiler
from engine.pipeline import Pipeline
from engine.ranks.group import RankGroup
from engine.ranks.messages import Join, Loaded, Setup
from engine.ranks.remote import RankedPipeline, RemoteConnector
from kv_transfer import RankConnector, RankedConnector


class RankProcesses:
    """Ranks 1 and up, and what all ranks have in common."""

    def __init__(
        self,
        config: BatonConfig,
        num_ranks: int,
        kv_keys: PlaneKeys | None,
        model_path: Path,
        incarnation: str,
        on_news: Callable[[], None],
        module: str = "engine.ranks.entry",
    ) -> None:
        """Starts their processes, which begin to load at once. `stop` must follow."""
        self._start_timeout_s = config.cluster.start_timeout_s
        device = rank_device(config.engine)
        # In no file system, so it is gone with the last rank, however that ends. Never closed: what torch would then
        # find under its number may be anything.
        meeting_file = os.memfd_create("baton-ranks")
        self.collectives = TorchCollectives(meeting_file, 0, num_ranks, device, config.engine.rank_timeout_s)
        text = config.model_dump_json(exclude_unset=True)  # what nobody has set may be the device's choice
        setups = [
            Setup(rank, num_ranks, text, kv_keys, str(model_path), incarnation, meeting_file)
            for rank in range(1, num_ranks)
        ]
        self._group = RankGroup(setups, on_news, self.collectives.abort, module)

    def join(self, digest: str) -> tuple[Loaded, ...]:
        """Connects the collectives when all have loaded what rank 0 has: what they say of themselves.

        Raises ConfigError or ModelError where a rank did, and ClusterError otherwise.
        """
        loaded = self._group.wait_until_loaded(self._start_timeout_s)
        for rank, facts in enumerate(loaded, 1):
            if facts.digest != digest:
                raise ClusterError(
                    f"rank {rank} has model {facts.digest}, and rank 0 has {digest}: is something changing the "
                    "model's folder?"
                )
        self._group.send(Join())
        try:
            self.collectives.connect()
        except RuntimeError as error:
            why = self._group.explain_start(error)
            raise ClusterError(f"the worker's ranks cannot reach one another: {why}") from error
        return loaded

    def pipeline(self, make_own: Callable[[], Pipeline]) -> Pipeline:
        """Of all ranks. `make_own` makes rank 0's; the others make theirs meanwhile, and may meet it in that."""
        try:
            own = make_own()
        except RuntimeError as error:
            raise self._group.explain_start(error) from error
        return RankedPipeline(own, self._group)

    def connector(self, own: RankConnector) -> ConnectorWorker:
        """Of all ranks."""
        remote = [RemoteConnector(link, self._group) for link in self._group.links]
        return RankedConnector([own, *remote])

    def serve(self) -> None:
        """Waits until every rank is ready; ClusterError if one does not get there.

        From then on `on_news` is called, and a failure is the engine's to take notice of.
        """
        self._group.wait_until_ready(self._start_timeout_s)
        self._group.serve()

    def stop(self) -> None:
        """Ends the processes, whether they are well or not. Rank 0 computes nothing any more."""
        self._group.begin_stop()
        self.collectives.close()
        self._group.stop()


class RankedExecutor:
    """Satisfies `engine.executor.Executor` with this process, rank 0, and the processes of the other ranks."""

    def __init__(self, own: DeviceEngine, others: RankProcesses) -> None:
        self.device_engine = own
        self._others = others
        loaded = others.join(own.model.digest)
        self.kv_addresses = (own.connector.kv_address, *(facts.kv_address for facts in loaded))
        num_blocks = min([own.num_blocks, *(facts.num_blocks for facts in loaded)])
        self.scheduler_config = own.scheduler_config.with_values("scheduler", num_blocks=num_blocks)
        self.connector: ConnectorWorker = others.connector(own.connector)

    def make_pipeline(self, grammars: GrammarCompiler) -> Pipeline:
        return self._others.pipeline(lambda: self.device_engine.make_pipeline(grammars))

    def start(self) -> None:
        self.device_engine.connector.start()
        self._others.serve()

    def stop(self) -> None:
        self.device_engine.connector.shutdown()
        self._others.stop()
        self.device_engine.free()


def start_ranks(
    config: BatonConfig,
    num_ranks: int,
    kv_keys: PlaneKeys | None,
    model_path: Path,
    incarnation: str,
    clock: Clock,
    on_news: Callable[[], None],
    on_progress: OnProgress,
) -> RankedExecutor:
    """See `engine.executor.start_executor`; `num_ranks` > 1."""
    others = RankProcesses(config, num_ranks, kv_keys, model_path, incarnation, on_news)
    try:
        own = build_device_engine(
            config, kv_keys, model_path, incarnation, others.collectives, clock, on_news, on_progress
        )
        return RankedExecutor(own, others)
    except BaseException:
        others.stop()
        raise
