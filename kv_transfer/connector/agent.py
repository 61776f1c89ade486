"""TransferAgent: the thread that runs a rank's hand-overs; knows no protocol.

Commands come in through one queue, and output leaves through another. The thread wakes only for a command, a message,
a deadline, or the end of a process whose pool is open.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from baton.clock import Clock
from baton.step import KVConnectorOutput
from baton.system.progress import Progress
from baton.system.standstill import wait_awake
from baton.system.wakeup import WakeUp
from kv_transfer.commands import WithdrawBlocks
from kv_transfer.connector.endpoint import TransferCommand, TransferEndpoint
from kv_transfer.transport.zmq_tcp import ZmqChannel

logger = logging.getLogger(__name__)

PROGRESS_TIMEOUT_S = 60.0
"""A transfer thread whose turn takes this long will not go on: its worker ends."""

TURN_TIMEOUT_S = 5.0
"""A turn of the agent's loop takes milliseconds; one that takes this long will not end."""


class TransferAgent:
    """`post` and `collect_output` are for the engine's thread; everything else happens on the agent's own."""

    def __init__(
        self, endpoint: TransferEndpoint, channel: ZmqChannel, clock: Clock, on_kv_output: Callable[[], None]
    ) -> None:
        self._endpoint = endpoint
        self._channel = channel
        self._clock = clock
        self._on_kv_output = on_kv_output
        self._commands: queue.SimpleQueue[tuple[Sequence[TransferCommand], threading.Event]] = (
            queue.SimpleQueue()
        )
        self._outputs: queue.SimpleQueue[KVConnectorOutput] = queue.SimpleQueue()
        self.progress = Progress("its KV transfer", clock, PROGRESS_TIMEOUT_S)
        self._wakeup = WakeUp()
        self._channel.wake_on(self._wakeup.fileno())
        self._channel.wake_on(endpoint.fileno())
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, if it was started, and closes every socket; peers' transfers end by their deadlines. May
        be repeated.
        """
        is_repeated, self._is_stopping = self._is_stopping, True
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join()
        elif not is_repeated:
            self._close()
        self._wakeup.close()

    def post(self, commands: Sequence[TransferCommand]) -> None:
        """Queues commands. Returns at once, unless one withdraws blocks: then once none of them is offered any more."""
        done = threading.Event()
        self._commands.put((commands, done))
        self._wakeup.set()
        if any(isinstance(command, WithdrawBlocks) for command in commands):
            self._check_withdrawn(done)
        self._check_alive()

    def collect_output(self) -> KVConnectorOutput:
        """The output since the last call; raises if the agent's thread has died."""
        self._check_alive()
        output = KVConnectorOutput()
        while not self._outputs.empty():
            output += self._outputs.get()
        return output

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self.progress.end()
                for arrival in self._channel.wait(self._seconds_to_deadline()):  # it sleeps before the first
                    self.progress.begin()
                    self._endpoint.take(arrival)
                self.progress.begin()
                self._wakeup.clear()
                self._execute_commands()
                self._endpoint.on_time()
                self._publish()
        except BaseException as error:  # nothing above catches this: tell the engine that the thread died
            logger.exception("the transfer thread died")
            self._failure = error
            self._on_kv_output()
        finally:
            self._close()
            self.progress.end()

    def _close(self) -> None:
        self._endpoint.close()
        self._channel.close()

    def _publish(self) -> None:
        if output := self._endpoint.collect_output():
            self._outputs.put(output)
            self._on_kv_output()

    def _check_withdrawn(self, done: threading.Event) -> None:
        """The next step writes these blocks, so it must not run before they are withdrawn."""
        if not wait_awake(done.wait, TURN_TIMEOUT_S) and self._failure is None:
            raise RuntimeError(f"the transfer thread did not withdraw blocks within {TURN_TIMEOUT_S:g} s")

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the transfer thread has died") from self._failure

    def _seconds_to_deadline(self) -> float | None:
        when = self._endpoint.next_deadline()
        return None if when is None else max(0.0, when - self._clock.now())

    def _execute_commands(self) -> None:
        while not self._commands.empty():
            commands, done = self._commands.get()
            for command in commands:
                self._endpoint.execute(command)
            done.set()
