"""RankedConnector: joins the connectors of a worker's tensor-parallel ranks; knows no message and no byte.

All ranks get the same commands, since a block has the same id on each rank. A load has arrived when it has
arrived on every rank. If it fails on one rank, the other ranks give it up, and only blocks that all ranks
have are kept. Blocks become free when no rank's transfer reads them any more.
"""

from collections import Counter
from collections.abc import Sequence, Set
from typing import Protocol

from baton.kv import TransferRole
from baton.step import FailedKV, KVConnectorOutput, ReceivedKV
from baton.transfer import TransferRecord
from baton.worker import KVPeerCounts
from kv_transfer.commands import AbortLoad, AbortSend, BeginSend, KVConnectorMetadata
from kv_transfer.parts import GiveUp, LoadAgain, LoadOutcome, LoadQuiesced, Loads, Sends
from kv_transfer.records import combine


class BlockMover(Protocol):
    """The half of the KV connector that moves bytes, for one rank or for all. No call raises because of a peer."""

    def send_commands(self, metadata: KVConnectorMetadata | None) -> None:
        """Carries out the commands of `metadata.at_once`. Called as soon as a step is planned.

        When this returns, blocks that a preemption took are not offered any more. Ranks in other processes stop
        offering them before their next step. A read that has begun may still run.
        """
        ...

    def start_load_kv(self, metadata: KVConnectorMetadata | None) -> None:
        """Called when all steps before the planned step are computed, so no step writes the blocks to load."""
        ...

    def save_kv_blocks(self, metadata: KVConnectorMetadata | None, preempted: Set[str]) -> None:
        """Called when the step is computed.

        The blocks that it filled may be sent, except those of `preempted` requests.
        """
        ...

    def get_finished(self) -> KVConnectorOutput: ...

    def counters(self) -> dict[str, int]: ...

    def peers(self) -> tuple[KVPeerCounts, ...]: ...

    def shutdown(self) -> None:
        """Ends all hand-overs, without a message to the peers. May be called more than once.

        A consumer soon notices that nothing listens here any more. A producer notices the end when its lease ends.
        """
        ...


class RankedConnector:
    """The connectors of all ranks; to the engine, they look like one connector."""

    def __init__(self, ranks: Sequence[BlockMover]) -> None:
        self._ranks = ranks
        self._loads: Loads[int] = Loads()
        self._sends: Sends[int] = Sends()
        self._records: dict[str, list[TransferRecord]] = {}
        """By request: the records of the ranks that have reported its end. Kept until all ranks have reported it."""

    def send_commands(self, metadata: KVConnectorMetadata | None) -> None:
        for command in metadata.at_once if metadata is not None else ():
            match command:
                case BeginSend():
                    self._sends.begin(command.request_id, range(len(self._ranks)))
                case AbortSend(is_held=False):
                    self._sends.forget(command.request_id)
                    self._records.pop(command.request_id, None)
                case AbortLoad():
                    self._loads.abort(command.request_id)
        for rank in self._ranks:
            rank.send_commands(metadata)

    def start_load_kv(self, metadata: KVConnectorMetadata | None) -> None:
        for command in metadata.loads if metadata is not None else ():
            self._loads.begin(command, range(len(self._ranks)))
        for rank in self._ranks:
            rank.start_load_kv(metadata)

    def save_kv_blocks(self, metadata: KVConnectorMetadata | None, preempted: Set[str]) -> None:
        for rank in self._ranks:
            rank.save_kv_blocks(metadata, preempted)

    def get_finished(self) -> KVConnectorOutput:
        """What ended on every rank since the last call."""
        ended = KVConnectorOutput()
        for number, rank in enumerate(self._ranks):
            output = rank.get_finished()
            for request_id, record in output.transfers.items():
                if request_id in self._sends or request_id in self._loads:
                    self._records.setdefault(request_id, []).append(record)
            for request_id in output.finished_sending:
                if self._sends.freed(request_id, number):
                    transfers = self._record(request_id)
                    ended += KVConnectorOutput(finished_sending=(request_id,), transfers=transfers)
            for received in output.finished_recving:
                ended += self._conclude(received.request_id, self._loads.arrived(number, received))
            for failed in output.failed_recving:
                ended += self._conclude(failed.request_id, self._loads.failed(number, failed))
            for request_id in output.quiesced:
                ended += self._conclude(request_id, self._loads.quiesced(request_id, number))
            ended += KVConnectorOutput(can_load=output.can_load, unwanted=output.unwanted)
        return ended

    def counters(self) -> dict[str, int]:
        """The counters, summed over the ranks."""
        total: Counter[str] = Counter()
        for rank in self._ranks:
            total.update(rank.counters())
        return dict(total)

    def peers(self) -> tuple[KVPeerCounts, ...]:
        """The counts of each peer and transport, summed over the ranks."""
        totals: dict[tuple[TransferRole, str, str], KVPeerCounts] = {}
        for counts in (counts for rank in self._ranks for counts in rank.peers()):
            key = counts.role, counts.peer, counts.transport
            totals[key] = totals[key] + counts if key in totals else counts
        return tuple(totals.values())

    def shutdown(self) -> None:
        for rank in self._ranks:
            rank.shutdown()

    def _conclude(self, request_id: str, outcome: LoadOutcome[int]) -> KVConnectorOutput:
        match outcome:
            case GiveUp(give_up, ranks):
                for number in ranks:
                    self._ranks[number].send_commands(KVConnectorMetadata((give_up,), (), ()))
            case LoadAgain(command, ranks):
                for number in ranks:
                    self._ranks[number].start_load_kv(KVConnectorMetadata((), (command,), ()))
            case ReceivedKV():
                return KVConnectorOutput(finished_recving=(outcome,), transfers=self._record(request_id))
            case FailedKV(is_postponed=True):
                return KVConnectorOutput(failed_recving=(outcome,))
            case FailedKV(reason=reason):
                commands = KVConnectorMetadata((AbortLoad(request_id, reason),), (), ())
                for rank in self._ranks:  # some ranks may have postponed the load
                    rank.send_commands(commands)
                return KVConnectorOutput(failed_recving=(outcome,), transfers=self._record(request_id))
            case LoadQuiesced():
                self._records.pop(request_id, None)
                return KVConnectorOutput(quiesced=(request_id,))
        return KVConnectorOutput()

    def _record(self, request_id: str) -> dict[str, TransferRecord]:
        """The record of a hand-over that has ended on all ranks."""
        records = self._records.pop(request_id, [])
        return {request_id: combine(records)} if records else {}
