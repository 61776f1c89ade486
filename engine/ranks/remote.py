"""RankedPipeline and RemoteConnector: give the engine access to other ranks' steps and connectors.

A rank executes its connector's commands when it has computed as many plans as rank 0 had when it sent the
commands. So a command for *when the step is computed* waits for this rank's own step. Commands that are due at once
do not wait.
"""

from collections import deque
from collections.abc import Set
from dataclasses import replace

from baton.step import KVConnectorOutput, SchedulerOutput
from baton.worker import KVPeerCounts
from engine.pipeline import DeviceLostError, Pipeline, StepResult
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
        """Sends the plan to other ranks first, since rank 0 may compute the step before `submit` returns."""
        self._group.send(Plan(replace(plan, kv_connector_metadata=None)))
        self._steps.append(plan.step)
        self._own.submit(plan)

    def take_result(self) -> StepResult:
        """Rank 0's own result, which includes the other ranks' parts; DeviceLostError if any rank has failed.

        No other step can follow then, since a rank may have stopped in the middle of this step. There is an error even
        if rank 0 has a result: on GPUs, an aborted wait for a rank returns without an error, and the result then
        contains arbitrary memory as that rank's part.
        """
        result = self._own.take_result()
        step = self._steps.popleft()
        self._group.num_computed += 1
        if result.error is not None:
            return StepResult(None, DeviceLostError(self._group.explain(step, result.error)))
        try:
            self._group.check()
        except RuntimeError as failure:
            return StepResult(None, DeviceLostError(str(failure)))
        return result

    def close(self) -> None:
        self._own.close()


class RemoteConnector:
    """Another rank's connector, as RankedConnector needs it. Every method returns at once."""

    def __init__(self, link: RankLink, group: RankGroup) -> None:
        self._link = link
        self._group = group

    def send_commands(self, metadata: KVConnectorMetadata | None) -> None:
        """Sends the commands that are due at once.

        It does not wait until blocks are withdrawn, since the rank withdraws them before its next step.
        """
        if metadata is not None and metadata.at_once:
            self._send(KVConnectorMetadata(metadata.at_once, (), ()), num_computed=0)

    def start_load_kv(self, metadata: KVConnectorMetadata | None) -> None:
        if metadata is not None and metadata.loads:
            self._send(KVConnectorMetadata((), metadata.loads, ()), self._group.num_computed)

    def save_kv_blocks(self, metadata: KVConnectorMetadata | None, preempted: Set[str]) -> None:
        if metadata is not None:
            filled = tuple(command for command in metadata.after if command.request_id not in preempted)
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
        """The counters in the rank's last report."""
        return self._link.report.counters

    def peers(self) -> tuple[KVPeerCounts, ...]:
        """The peers in the rank's last report."""
        return self._link.report.peers

    def shutdown(self) -> None:
        """Tells the ranks to stop; each rank shuts down its own connector then."""
        self._group.begin_stop()

    def _send(self, commands: KVConnectorMetadata, num_computed: int) -> None:
        self._group.send_to(self._link, RankCommands(commands, num_computed))
