"""RankedPipeline and RemoteConnector: the engine's access to the other ranks' steps and connectors.

A rank carries out its connector's commands once it has computed as many plans as rank 0 had when rank 0 sent them. So
*when the step is computed* holds for each rank by itself.
"""

from collections import deque
from collections.abc import Set
from dataclasses import replace

from baton.step import KVConnectorOutput, SchedulerOutput
from baton.worker import KVPeerCounts
from engine.pipeline import Pipeline, StepResult
from engine.ranks.group import RankGroup, RankLink
from engine.ranks.messages import Plan, RankCommands
from kv_transfer import KVConnectorMetadata


class RankedPipeline:
    """Rank 0's pipeline, whose steps the other ranks compute too."""

    def __init__(self, own: Pipeline, group: RankGroup) -> None:
        self._own = own
        self._group = group
        self._steps: deque[int] = deque()

    def num_ahead(self, plan: SchedulerOutput) -> int:
        return self._own.num_ahead(plan)

    def submit(self, plan: SchedulerOutput) -> None:
        """Sends to the others first: rank 0 may compute the step before this returns."""
        self._group.send(Plan(replace(plan, kv_connector_metadata=None)))
        self._steps.append(plan.step)
        self._own.submit(plan)

    def take(self) -> StepResult:
        """Rank 0's own result, which includes what the others computed. The failure of any rank makes it an error.

        This holds even if rank 0 has a result: on GPUs, an aborted wait for a rank returns without an error, and with
        arbitrary memory for that rank's part.
        """
        result = self._own.take()
        step = self._steps.popleft()
        self._group.num_computed += 1
        if result.error is not None:
            return StepResult(None, self._group.explain(step, result.error))
        try:
            self._group.check()
        except RuntimeError as failure:
            return StepResult(None, failure)
        return result

    def close(self) -> None:
        self._own.close()


class RemoteConnector:
    """Another rank's connector, as RankedConnector needs it. Every method returns at once."""

    def __init__(self, link: RankLink, group: RankGroup) -> None:
        self._link = link
        self._group = group

    def send_commands(self, metadata: KVConnectorMetadata | None) -> None:
        """Withdrawn blocks need no wait here: the rank carries out the command before the next step."""
        if metadata is not None and metadata.at_once:
            self._send(KVConnectorMetadata(metadata.at_once, (), ()), num_computed=0)

    def start_load_kv(self, metadata: KVConnectorMetadata | None) -> None:
        if metadata is not None and metadata.loads:
            self._send(KVConnectorMetadata((), metadata.loads, ()), self._group.num_computed)

    def save_kv_blocks(self, metadata: KVConnectorMetadata | None, lost: Set[str]) -> None:
        if metadata is not None:
            filled = tuple(command for command in metadata.after if command.request_id not in lost)
            if filled:
                self._send(KVConnectorMetadata((), (), filled), self._group.num_computed)

    def get_finished(self) -> KVConnectorOutput:
        """The rank's outputs since the last call; RuntimeError if any rank of the worker has failed."""
        self._group.check()
        output = KVConnectorOutput()
        while not self._link.outputs.empty():
            output += self._link.outputs.get()
        return output

    def counters(self) -> dict[str, int]:
        """As the rank last reported."""
        return self._link.report.counters

    def peers(self) -> tuple[KVPeerCounts, ...]:
        """As the rank last reported."""
        return self._link.report.peers

    def shutdown(self) -> None:
        """The rank shuts its own connector when it stops."""
        self._group.begin_stop()

    def _send(self, commands: KVConnectorMetadata, num_computed: int) -> None:
        self._group.send_to(self._link, RankCommands(commands, num_computed))
