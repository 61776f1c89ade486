"""RankProcesses: the processes of a worker's other tensor-parallel ranks, seen from this process, rank 0.

process of rank 0    scheduler, engine loop, request plane; its part of the model       worker/host.py
process of rank r    its part of the model, the same steps; its own device, KV pool     engine/ranks/process.py
                     and transfer thread
"""

import os
from collections.abc import Callable
from pathlib import Path

from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.system.curve import PlaneKeys
from engine.collectives import TorchCollectives
from engine.device import rank_device
from engine.pipeline import Pipeline
from engine.ranks.group import RankGroup
from engine.ranks.messages import Join, Loaded, Setup
from engine.ranks.remote import RankedPipeline, RemoteConnector
from kv_transfer import BlockMover, RankedConnector


class RankProcesses:
    """The processes of ranks 1 and up, and the collectives of all ranks."""

    def __init__(
        self,
        config: BatonConfig,
        num_ranks: int,
        kv_keys: PlaneKeys | None,
        model_path: Path,
        incarnation: str,
        on_kv_output: Callable[[], None],
        module: str = "engine.ranks.entry",
    ) -> None:
        """Starts the processes, which begin to load at once. The caller must call `stop` at the end."""
        self._start_timeout_s = config.cluster.start_timeout_s
        device = rank_device(config.engine)
        # The file is in memory, so it vanishes with the last rank. It is never closed: torch opens the file
        # by its number, and after a close the number could mean another file.
        meeting_file = os.memfd_create("baton-ranks")
        self.collectives = TorchCollectives(meeting_file, 0, num_ranks, device, config.engine.rank_timeout_s)
        text = config.model_dump_json(exclude_unset=True)  # each rank chooses unset values by its device
        setups = [
            Setup(rank, num_ranks, text, kv_keys, str(model_path), incarnation, meeting_file)
            for rank in range(1, num_ranks)
        ]
        max_step_s = config.engine.progress_timeout_s
        self._group = RankGroup(setups, max_step_s, on_kv_output, self.collectives.abort, module)

    def join(self, digest: str) -> tuple[Loaded, ...]:
        """Connects the collectives once all ranks have loaded rank 0's model; returns what each rank reported.

        Raises a rank's own ConfigError or ModelError, and ClusterError for any other failure.
        """
        loaded = self._group.wait_until_loaded(self._start_timeout_s)
        for rank, facts in enumerate(loaded, 1):
            if facts.digest != digest:
                raise ClusterError(
                    f"rank {rank} has model {facts.digest}, and rank 0 has {digest}; do not change the model's "
                    "folder while the worker starts"
                )
        self._group.send(Join())
        try:
            self.collectives.connect()
        except RuntimeError as error:
            why = self._group.explain_start(error)
            raise ClusterError(f"the worker's ranks cannot reach one another: {why}") from error
        return loaded

    def pipeline(self, make_own: Callable[[], Pipeline]) -> Pipeline:
        """The pipeline of all ranks. `make_own` makes rank 0's pipeline while the other ranks make theirs."""
        try:
            own = make_own()
        except RuntimeError as error:
            raise self._group.explain_start(error) from error
        return RankedPipeline(own, self._group)

    def connector(self, own: BlockMover) -> BlockMover:
        """The connector of all ranks."""
        remote = [RemoteConnector(link, self._group) for link in self._group.links]
        return RankedConnector([own, *remote])

    def serve(self) -> None:
        """Waits until every rank is ready; ClusterError if a rank fails or is late.

        From then on `on_kv_output` is called, and the engine handles failures.
        """
        self._group.wait_until_ready(self._start_timeout_s)
        self._group.serve()

    @property
    def has_lost_rank(self) -> bool:
        """Whether the worker failed because a rank's process ended after `serve`."""
        return self._group.has_lost_rank

    def stop(self) -> None:
        """Ends the processes in any state. Rank 0 must not compute any more."""
        self._group.begin_stop()
        self.collectives.close()
        self._group.stop()
