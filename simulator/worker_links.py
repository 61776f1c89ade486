"""WorkerLinks: a simulated gateway's end of the request plane to every worker, in place of gateway/workers/.

Real: the session with each worker. Faults decide which worker is silent, and which messages arrive.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.messages.request_plane import AbortRequests, Heartbeat, Hello, RunSuspect, SubmitRequest
from baton.messages.session import GatewaySession
from baton.request import RequestOutput
from baton.worker import WorkerStatus
from gateway.workers.worker_listener import LossCause, WorkerListener
from simulator.worker import Worker
from simulator.world import World

MAX_DELAY_S = 0.002

_Command = SubmitRequest | RunSuspect | AbortRequests


@dataclass(slots=True)
class RequestPlane:
    """Messages between gateway and workers: in order and reliable, unless the connection is cut."""

    world: World
    cut_off: set[str] = field(default_factory=set)
    """Names of ends that are cut off: no message reaches them, and their messages reach no other end."""
    _last_arrival: dict[tuple[str, str], float] = field(default_factory=dict)

    def send(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """Sends a message. It is lost if one end is cut off when it is sent, or when it would arrive."""
        if self._is_cut(source, target):
            return
        when = self.world.now + self.world.between(0.0001, MAX_DELAY_S)
        when = self._last_arrival[source, target] = max(when, self._last_arrival.get((source, target), 0.0))
        self.world.at(when, lambda: None if self._is_cut(source, target) else arrive())

    def _is_cut(self, source: str, target: str) -> bool:
        is_cut = source in self.cut_off or target in self.cut_off
        self.world.counts["fault request plane cut"] += is_cut
        return is_cut


class WorkerLinks:
    """The links of one gateway, until it dies."""

    def __init__(self, world: World, name: str, listener: WorkerListener) -> None:
        self.name = name
        self.is_dead = False
        self._world = world
        self._listener = listener
        self._workers: dict[str, Worker] = {}
        self._silent: set[str] = set()
        self._plane = RequestPlane(world)
        self._sessions: dict[str, GatewaySession] = {}
        self._num_connections = 0

    # workers come and go

    def add(self, worker: Worker) -> None:
        """Adds a new incarnation. The requests of the last incarnation of this name are lost."""
        if self.is_dead:
            return
        self.lose(worker.name, LossCause.REPLACED)
        self._workers[worker.name] = worker
        self._silent.discard(worker.name)
        self._num_connections += 1
        session = self._sessions[worker.name] = GatewaySession(
            worker.incarnation, self.name, self._num_connections
        )
        worker.on_hello(self.name, session.hello())
        heartbeat = worker.heartbeat(self.name)
        session.note_heartbeat(heartbeat)
        self._listener.on_status(heartbeat.status)

    def lose(self, name: str, cause: LossCause) -> None:
        """Removes the worker."""
        if self._workers.pop(name, None) is not None:
            self._report_loss(name, cause, cause.value)

    def note_silence(self, name: str) -> None:
        if name in self._workers:
            self._report_loss(name, LossCause.SILENT, "silent")
            self._silent.add(name)

    def _report_loss(self, name: str, cause: LossCause, reason: str) -> None:
        """Reports a loss once: requests on a silent worker are lost already."""
        if name not in self._silent:
            self._listener.on_worker_lost(name, cause, reason)

    def end_silence(self, name: str) -> None:
        self._silent.discard(name)
        if worker := self._workers.get(name):
            self._on_status(worker.heartbeat(self.name).status)

    def cut_off(self, name: str) -> None:
        """Lets no message pass between gateway and worker, in either direction, until `reconnect`."""
        self._plane.cut_off.add(name)

    def reconnect(self, name: str) -> None:
        """Lets messages pass again. The next Hello and its answer show which messages were lost."""
        self._plane.cut_off.discard(name)
        self.end_silence(name)
        if worker := self._workers.get(name):
            hello = self._sessions[name].hello()
            self._plane.send(
                "gateway", name, lambda: self._if_alive(worker, lambda: self._answer(worker, hello))
            )

    def die(self) -> list[Worker]:
        """Ends the links, as SIGKILL does: no more messages. Returns the workers that had a session."""
        self.is_dead = True
        workers = list(self._workers.values())
        self._plane.cut_off.add("gateway")
        self._workers.clear()
        return workers

    # messages

    def send(self, name: str, make: Callable[[GatewaySession], _Command]) -> None:
        """Sends a command to a worker, unless the worker was lost."""
        if (worker := self._workers.get(name)) is None:
            return
        self._send_command(worker, make(self._sessions[name]))

    def _send_command(self, worker: Worker, command: _Command) -> None:
        name = worker.name
        self._sessions[name].count_command()
        self._plane.send(
            "gateway", name, lambda: self._if_alive(worker, lambda: worker.on_command(self.name, command))
        )

    def outbox(self, worker: Worker, outputs: list[RequestOutput]) -> None:
        """On a worker's thread: sends outputs to the gateway, unless connection or session are gone."""
        if not worker.sessions.count_outputs(self.name.encode()):
            return
        if (worker.name in self._plane.cut_off or self.is_dead) and self._world.chance(0.5):
            worker.lose_gateway(self.name)
            return

        def arrive() -> None:
            if self._workers.get(worker.name) is worker:
                self._sessions[worker.name].note_outputs()
                self._listener.on_outputs(worker.name, tuple(outputs))

        self._plane.send(worker.name, "gateway", arrive)

    def send_heartbeat(self, worker: Worker) -> None:
        """On a worker's thread: sends a heartbeat to the gateway, if they have a session."""
        if self.name.encode() in worker.sessions.peers:
            self._send_heartbeat(worker)

    def _send_heartbeat(self, worker: Worker) -> None:
        heartbeat = worker.heartbeat(self.name)
        self._plane.send(worker.name, "gateway", lambda: self._on_heartbeat(worker, heartbeat))

    def deliver_heartbeats(self) -> None:
        for worker in list(self._workers.values()):
            self.deliver_heartbeat(worker)

    def deliver_heartbeat(self, worker: Worker) -> None:
        """Delivers a heartbeat to the gateway, if the worker can send one, and no fault stops it."""
        is_mute = worker.is_dead or worker.paused_until > self._world.now
        is_known = self._workers.get(worker.name) is worker
        if is_known and not is_mute and worker.name not in self._silent | self._plane.cut_off:
            self._on_status(worker.heartbeat(self.name).status)

    def _answer(self, worker: Worker, hello: Hello) -> None:
        """Answers a Hello, as a worker's request plane does."""
        worker.on_hello(self.name, hello)
        self._send_heartbeat(worker)

    def _on_heartbeat(self, worker: Worker, heartbeat: Heartbeat) -> None:
        if self._workers.get(worker.name) is not worker:
            return
        if loss := self._sessions[worker.name].note_heartbeat(heartbeat):
            self._world.counts["path session lost"] += 1
            self._report_loss(worker.name, LossCause.SESSION_LOST, loss)
        if worker.name not in self._silent:
            self._on_status(heartbeat.status)

    def _on_status(self, status: WorkerStatus) -> None:
        self._listener.on_status(status)
        if worker := self._workers.get(status.ref.name):
            for command in self._sessions[worker.name].run_named(status):
                self._send_command(worker, command)

    def _if_alive(self, worker: Worker, action: Callable[[], None]) -> None:
        if not worker.is_dead:
            action()
