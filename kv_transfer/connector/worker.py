"""KVConnectorWorker: the half of the connector that moves bytes, on its own thread.

The scheduler's half is worker/kv_connector_scheduler.py. worker/core.py calls this half around each step, as a
`BlockMover`. One queue brings commands to the thread, another returns output. The thread sleeps until there is a
command, traffic of a peer, a deadline, or the end of a process whose pool is open.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence, Set

from baton.clock import Clock
from baton.config import KVTransferConfig
from baton.kv import KVFingerprint
from baton.step import KVConnectorOutput
from baton.system.curve import PlaneKeys
from baton.system.progress import Progress
from baton.system.standstill import wait_awake
from baton.system.wakeup import WakeUp
from baton.worker import KVPeerCounts
from kv_transfer.commands import KVConnectorMetadata, WithdrawBlocks
from kv_transfer.connector.endpoint import TransferCommand, make_endpoint
from kv_transfer.pool import DeviceBlocks, make_pool
from kv_transfer.transport.base import Bytes
from kv_transfer.transport.choice import make_offer, make_readers
from kv_transfer.transport.shared_memory import SharedMemory
from kv_transfer.transport.zmq_tcp import IDLE_S, ZmqChannel

logger = logging.getLogger(__name__)

PROGRESS_TIMEOUT_S = 60.0
"""The longest time for one turn of the transfer thread. After that, the thread counts as hung, and the worker ends."""

TURN_TIMEOUT_S = 5.0
"""How long the engine waits for the transfer thread to withdraw blocks. A turn normally takes milliseconds."""


class KVConnectorWorker:
    """The connector of one rank, for both roles; each request says whether it is sent or received.

    The engine's thread calls its methods; `counters` and `peers` are for any thread. The transfer thread does all the
    rest. Only `shutdown`, and a call that withdraws blocks, wait for it. No call raises because of a peer. The transfer
    thread calls `on_kv_output` whenever `get_finished` has output.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        bind_host: str,
        keys: PlaneKeys | None,
        incarnation: str,
        clock: Clock,
        blocks: Bytes | DeviceBlocks,
        fingerprint: KVFingerprint,
        on_kv_output: Callable[[], None],
        *,
        rank: int = 0,
        memory: SharedMemory | None = None,
        advertise_host: str | None = None,
    ) -> None:
        """`blocks` is the rank's pool, read and written in place: uint8 [num_blocks, block_nbytes], or on a device.

        `memory` is the memory that has `blocks`, if `blocks` are on the host and other processes may map them.
        """
        pool = make_pool(blocks, fingerprint, rank)
        self._channel = ZmqChannel(
            bind_host,
            pool.block_nbytes,
            keys,
            clock,
            advertise_host,
            max_queued_bytes=2 * config.max_inflight_mib * 2**20,
            dead_s=max(config.lease_s, config.peer_timeout_s),
            idle_s=max(IDLE_S, config.peer_timeout_s),  # heartbeats are more frequent than peer_timeout_s
        )
        readers = make_readers(config, blocks, memory, clock)
        self._endpoint = make_endpoint(
            config,
            incarnation,
            pool,
            self._channel,
            {reader.name: reader for reader in readers},
            make_offer(config, readers),
            clock,
        )
        self._clock = clock
        self._on_kv_output = on_kv_output
        self._commands: queue.SimpleQueue[tuple[Sequence[TransferCommand], float, threading.Event]] = (
            queue.SimpleQueue()
        )
        self._outputs: queue.SimpleQueue[KVConnectorOutput] = queue.SimpleQueue()
        self._wakeup = WakeUp()
        self._channel.wake_on(self._wakeup.fileno())
        self._channel.wake_on(self._endpoint.fileno())
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self.kv_address = self._channel.address
        self.progress = Progress("its KV transfer", clock, PROGRESS_TIMEOUT_S)
        """Progress of the transfer thread."""

    def start(self) -> None:
        self._thread.start()

    def send_commands(self, metadata: KVConnectorMetadata | None) -> None:
        """Passes the commands of `metadata.at_once` to the transfer thread. Call it as soon as a step is planned.

        Returns at once, unless the commands withdraw blocks. Then it waits until none of these blocks is offered any
        more.
        """
        if metadata is not None and metadata.at_once:
            self._post(metadata.at_once)

    def start_load_kv(self, metadata: KVConnectorMetadata | None) -> None:
        """Call it when all steps before the planned one are computed, so that no step writes the blocks to load."""
        if metadata is not None and metadata.loads:
            self._post(metadata.loads)

    def save_kv_blocks(self, metadata: KVConnectorMetadata | None, preempted: Set[str]) -> None:
        """Call it when the step is computed: its blocks may be sent, except those of `preempted` requests."""
        if metadata is not None:
            filled = tuple(command for command in metadata.after if command.request_id not in preempted)
            if filled:
                self._post(filled)

    def get_finished(self) -> KVConnectorOutput:
        """The output since the last call. Raises if the transfer thread has died."""
        self._check_alive()
        output = KVConnectorOutput()
        while not self._outputs.empty():
            output += self._outputs.get()
        return output

    def counters(self) -> dict[str, int]:
        """Monotonic counts since the start; safe from any thread."""
        return {
            **self._endpoint.counters,
            "kv_dropped_frames": self._channel.num_dropped,
            "kv_denied_peers": self._channel.num_denied,
            "kv_disconnections": self._channel.num_disconnections,
        }

    def peers(self) -> tuple[KVPeerCounts, ...]:
        """Hand-overs by peer since the start; safe from any thread."""
        return self._endpoint.metrics.snapshot()

    def shutdown(self) -> None:
        """Ends the thread, if it was started, and closes every socket. May be repeated.

        Peers get no message: see BlockMover.
        """
        is_repeated, self._is_stopping = self._is_stopping, True
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join()
        elif not is_repeated:
            self._close()
        self._wakeup.close()

    def _post(self, commands: Sequence[TransferCommand]) -> None:
        done = threading.Event()
        self._commands.put((commands, self._clock.now(), done))
        self._wakeup.set()
        withdraws = any(isinstance(command, WithdrawBlocks) for command in commands)
        # The next step writes withdrawn blocks.
        if withdraws and not wait_awake(done.wait, TURN_TIMEOUT_S) and self._failure is None:
            raise RuntimeError(f"the transfer thread did not withdraw blocks within {TURN_TIMEOUT_S:g} s")
        self._check_alive()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the transfer thread has died") from self._failure

    # the transfer thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self.progress.end()
                for arrival in self._channel.wait(self._seconds_to_deadline()):  # first waits, then yields
                    self.progress.begin()
                    self._endpoint.on_arrival(arrival)
                self.progress.begin()
                for address in self._channel.collect_gone():
                    self._endpoint.on_gone(address)
                self._wakeup.clear()
                self._execute_commands()
                self._endpoint.on_time()
                self._publish()
        except BaseException as error:  # nothing else catches this: tell the engine that the thread died
            logger.exception("the transfer thread died")
            self._failure = error
            self._on_kv_output()
        finally:
            self._close()
            self.progress.end()

    def _seconds_to_deadline(self) -> float | None:
        when = self._endpoint.next_deadline()
        return None if when is None else max(0.0, when - self._clock.now())

    def _execute_commands(self) -> None:
        while not self._commands.empty():
            commands, issued_at, done = self._commands.get()
            for command in commands:
                self._endpoint.execute(command, issued_at)
            done.set()

    def _publish(self) -> None:
        if output := self._endpoint.collect_output():
            self._outputs.put(output)
            self._on_kv_output()

    def _close(self) -> None:
        self._endpoint.close()
        self._channel.close()
