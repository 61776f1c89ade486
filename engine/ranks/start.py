"""start_ranks: a worker's tensor-parallel ranks, of which this process is the first, as one pipeline and one connector.

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
from engine.build import OnProgress, RankParts, build_rank
from engine.collectives import Collectives, SingleRank, TorchCollectives
from engine.connector import ConnectorWorker
from engine.device import rank_device
from engine.grammars.compiler import GrammarCompiler
from engine.pipeline import Pipeline
from engine.ranks.group import RankGroup
from engine.ranks.messages import Join, Loaded, Setup
from engine.ranks.remote import RankedPipeline, RemoteConnector
from kv_transfer import RankConnector, RankedConnector


class OtherRanks:
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

    def connector(self, own: RankConnector, block_size: int) -> ConnectorWorker:
        """Of all ranks."""
        remote = [RemoteConnector(link, self._group) for link in self._group.links]
        return RankedConnector([own, *remote], block_size)

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


class Ranks:
    """All ranks of a worker: they have loaded and are connected. `make_pipeline` and `start` follow."""

    def __init__(self, parts: RankParts, others: OtherRanks | None = None) -> None:
        """`parts` are this process's."""
        self.parts = parts
        self._others = others
        self._is_started = False
        self.kv_addresses: tuple[str, ...] = (parts.connector.kv_address,)
        """Where the KV plane of each rank listens."""
        self.connector: ConnectorWorker = parts.connector
        """Of all ranks."""
        self.scheduler_config = parts.scheduler_config
        """The worker's: with as many blocks as the rank that has fewest."""
        if others is not None:
            loaded = others.join(parts.model.digest)
            self.kv_addresses += tuple(facts.kv_address for facts in loaded)
            num_blocks = min([parts.num_blocks, *(facts.num_blocks for facts in loaded)])
            self.scheduler_config = parts.scheduler_config.with_values("scheduler", num_blocks=num_blocks)
            self.connector = others.connector(parts.connector, self.scheduler_config.block_size)

    def make_pipeline(self, grammars: GrammarCompiler) -> Pipeline:
        """Where the worker's steps are computed, on every rank."""
        if self._others is None:
            return self.parts.make_pipeline(grammars)
        return self._others.pipeline(lambda: self.parts.make_pipeline(grammars))

    def start(self) -> None:
        """Begins to move KV, and to tell of news; blocks until every rank is ready. Raises as `start_ranks`."""
        self._is_started = True
        self.parts.connector.start()
        if self._others is not None:
            self._others.serve()

    def stop(self) -> None:
        """Ends what `start` began, and the other processes, if there are any."""
        if self._is_started:
            self.parts.connector.shutdown()
        if self._others is not None:
            self._others.stop()
        self.parts.free()


def start_ranks(
    config: BatonConfig,
    num_ranks: int,
    kv_keys: PlaneKeys | None,
    model_path: Path,
    incarnation: str,
    clock: Clock,
    on_news: Callable[[], None],
    on_progress: OnProgress,
) -> Ranks:
    """Loads the model on every rank, in parallel; blocks until all of them are there.

    ConfigError, ModelError or ClusterError if they cannot be; no process is left then. `on_news` is called from any
    thread, after `Ranks.start`; `on_progress` hears how far rank 0 is.
    """

    def build(collectives: Collectives) -> RankParts:
        return build_rank(config, kv_keys, model_path, incarnation, collectives, clock, on_news, on_progress)

    if num_ranks == 1:
        return Ranks(build(SingleRank()))
    others = OtherRanks(config, num_ranks, kv_keys, model_path, incarnation, on_news)
    try:
        return Ranks(build(others.collectives), others)
    except BaseException:
        others.stop()
        raise
