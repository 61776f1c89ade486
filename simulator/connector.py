"""SimConnector: the connector's worker half without a thread, and a ledger of the blocks that it holds.

As in kv_transfer/connector/worker.py, commands wait in a queue for the transfer thread, which takes them
after a moment. The engine waits only for commands that withdraw blocks. Results wait in a queue for the engine.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

from baton.clock import Clock
from baton.config import KVTransferConfig
from baton.kv import KVTransferParams
from baton.step import KVConnectorOutput
from baton.worker import KVPeerCounts
from kv_transfer import KVConnectorMetadata
from kv_transfer.commands import (
    AbortLoad,
    AbortSend,
    BeginLoad,
    BeginSend,
    FinishSend,
    LoadBlocks,
    NoteStarvation,
    WithdrawBlocks,
)
from kv_transfer.connector.endpoint import TransferCommand, TransferEndpoint, make_endpoint
from kv_transfer.pool import RankPool
from kv_transfer.protocol.transports import TransportOffer
from kv_transfer.transport.base import Arrival, PoolReader
from simulator.leases import Leases
from simulator.network import SimChannel
from simulator.world import Process, World


@dataclass(slots=True)
class HeldBlocks:
    """One entry of the ledger: the blocks that a transfer holds, or a load that waits for blocks."""

    kind: str
    """sending (the prompt is being computed), leased, waiting (for room), loading or quarantined."""
    since: float
    transfer: KVTransferParams


class SimConnector:
    """Belongs to one incarnation of a worker; `wake` is called when there are results for its engine."""

    def __init__(self, world: World, process: Process, clock: Clock, wake: Callable[[], None]) -> None:
        self._world = world
        self._process = process
        self._clock = clock
        self._name = process.incarnation
        self._wake = wake
        self._commands: deque[TransferCommand] = deque()
        self._output = KVConnectorOutput()
        self._timer: float | None = None
        self.endpoint: TransferEndpoint
        self._leases: Leases
        self.counts: Counter[str]
        self.holds: dict[str, HeldBlocks] = {}
        self.began_loads_at: dict[str, float] = {}
        """By hand-over: when this worker began a load."""
        self.max_command_delay_s = 0.0

    def attach(
        self,
        config: KVTransferConfig,
        incarnation: str,
        pool: RankPool,
        channel: SimChannel,
        readers: Mapping[str, PoolReader],
        host: str,
        transports: tuple[str, ...],
    ) -> None:
        """Creates the endpoint, whose messages pass through `channel`."""
        offer = TransportOffer(
            host, transports, {name: reader.describe() or b"" for name, reader in readers.items()}
        )
        self.endpoint = make_endpoint(config, incarnation, pool, channel, readers, offer, self._clock)
        self.counts = self.endpoint.counters
        self._leases = Leases(self._world, self._process, config.lease_s)
        channel.on_arrival = self._on_arrival
        channel.on_gone = self._on_gone

    # the engine's calls, as worker/core.py makes them

    def get_finished(self) -> KVConnectorOutput:
        output, self._output = self._output, KVConnectorOutput()
        return output

    def send_commands(self, metadata: KVConnectorMetadata | None) -> None:
        if metadata is not None and metadata.at_once:
            self._post(metadata.at_once)

    def start_load_kv(self, metadata: KVConnectorMetadata | None) -> None:
        if metadata is not None and metadata.loads:
            self._post(metadata.loads)

    def save_kv_blocks(self, metadata: KVConnectorMetadata | None, preempted: Set[str]) -> None:
        if metadata is not None:
            self._post(tuple(command for command in metadata.after if command.request_id not in preempted))

    def counters(self) -> dict[str, int]:
        return dict(self.counts)

    def peers(self) -> tuple[KVPeerCounts, ...]:
        return self.endpoint.metrics.snapshot()

    def shutdown(self) -> None:
        self.endpoint.close()

    def blocks_to_write(self) -> dict[str, set[int]]:
        """By request: the blocks that its load may still write."""
        blocks: dict[str, set[int]] = {}
        for transfer in self.endpoint._consumer_end._consumer._transfers.values():
            # A load that was given up writes only what is arriving already.
            indices = transfer.targets if transfer.is_loading else transfer.arriving
            if indices:
                pieces_per_block = transfer.shape.pieces_per_block
                pieces = (transfer.targets[index] for index in indices)
                blocks[transfer.rank_transfer.request_id] = {piece // pieces_per_block for piece in pieces}
        return blocks

    # the transfer thread's part

    def turn(self) -> None:
        """Called after each event: runs due timers, and passes results on."""
        num_expired = self.counts["kv_lease_expiries"]
        self.endpoint.on_time()
        num_expired = self.counts["kv_lease_expiries"] - num_expired
        output = self.endpoint.collect_output()
        if output:
            freed = [self.holds[name].transfer for name in output.finished_sending if name in self.holds]
            self._leases.check(num_expired, freed)
            self._end_holds(output)
            self._output += output
            self._wake()
        self._set_timer()

    def wake_up(self) -> None:
        """Called when a transport reports that a read has ended."""
        self._world.after(0.0, self.turn, self._process)

    def _on_arrival(self, arrival: Arrival) -> None:
        self._world.log(self._name, f"<- {arrival.peer!r} {arrival.header[:8].hex()}")
        self._leases.on_arrival(arrival)
        self.endpoint.on_arrival(arrival)
        self.turn()

    def _on_gone(self, address: str) -> None:
        self._world.log(self._name, f"{address} is gone")
        self.endpoint.on_gone(address)
        self.turn()

    def _post(self, commands: Sequence[TransferCommand]) -> None:
        for command in commands:
            request_id = "" if isinstance(command, NoteStarvation) else command.request_id
            self._world.log(
                self._name, f"order {type(command).__name__} {request_id}", partial(repr, command)
            )
            self._commands.append(command)
        if any(isinstance(command, WithdrawBlocks) for command in commands):
            self._world.counts["commands taken back"] += 1
            self._execute()
        elif commands:
            delay_s = self._world.between(0.0, self.max_command_delay_s)
            if delay_s > 0.0:
                self._world.after(delay_s, self._execute, self._process)
            else:
                self._execute()

    def _execute(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            self._note_hold(command)
            self.endpoint.execute(command)
        self.turn()

    def _set_timer(self) -> None:
        """Wakes up at the next deadline. An earlier deadline moves the timer; a later one does not."""
        deadline = self.endpoint.next_deadline()
        if deadline is None:
            return
        when = max(self._world.now, self._world.now + deadline - self._clock.now())
        if self._timer is None or when < self._timer:
            self._timer = when
            self._world.at(when, lambda: self._on_timer(when), self._process)

    def _on_timer(self, when: float) -> None:
        if self._timer == when:
            self._timer = None
            self.turn()

    # the ledger

    def _note_hold(self, command: TransferCommand) -> None:
        if isinstance(command, NoteStarvation):
            return
        now, request_id = self._world.now, command.request_id
        match command:
            case BeginSend(transfer=transfer):
                self.holds[request_id] = HeldBlocks("sending", now, transfer)
            case BeginLoad(transfer=transfer):
                self.holds[request_id] = HeldBlocks("waiting", now, transfer)
                self.began_loads_at[transfer.transfer_id] = now
            case FinishSend():
                self._become(request_id, "leased")
                self._leases.begin(self.holds[request_id].transfer)
            case AbortSend(is_held=is_held):
                self._become(request_id, "leased" if is_held else None)
            case LoadBlocks():
                self._become(request_id, "loading")
            case AbortLoad():
                is_loading = self.holds[request_id].kind == "loading" if request_id in self.holds else False
                self._become(request_id, "quarantined" if is_loading else None)

    def _become(self, request_id: str, kind: str | None) -> None:
        hold = self.holds.pop(request_id, None)
        if hold is not None and kind is not None:
            self.holds[request_id] = HeldBlocks(kind, self._world.now, hold.transfer)

    def _end_holds(self, output: KVConnectorOutput) -> None:
        postponed = [load for load in output.failed_recving if load.is_postponed]
        ended = [
            *output.finished_sending,
            *(load.request_id for load in output.finished_recving),
            *(load.request_id for load in output.failed_recving if not load.is_postponed),
            *output.quiesced,
        ]
        for request_id in ended:
            self._world.log(self._name, f"news {request_id}")
            self.holds.pop(request_id, None)
        for load in postponed:
            self._become(load.request_id, "waiting")
