"""Carries out what the scenario has in store for the workers: pauses, crashes, partitions, cuts, failing devices."""

from collections.abc import Callable

from tests.simulation.gateway import SimGateway
from tests.simulation.scenario import Fault, WorkerSpec
from tests.simulation.worker import Site, Worker

MAX_HEARTBEAT_S = 0.05
"""Until a gateway hears of a change."""


class Fleet:
    """The workers as they are at present, each in the latest of its lives."""

    def __init__(self, site: Site, gateway: SimGateway) -> None:
        self._site = site
        self._world = site.world
        self._gateway = gateway
        self._specs = {spec.name: spec for spec in site.scenario.workers}
        self._peer_timeout_s = site.scenario.transfer.peer_timeout_s
        self.lives: list[Worker] = []
        self.workers: dict[str, Worker] = {}
        for spec in site.scenario.workers:
            self._start(spec)

    def plan(self, fault: Fault) -> None:
        """It will happen when its time comes; never within a step of an engine."""
        actions: dict[str, Callable[[Fault], None]] = {
            "pause": self._pause,
            "crash": self._crash,
            "partition": self._part,
            "disconnect": self._disconnect,
            "device": self._fail_device,
            "reset": self._reset,
            "break": self._break_reads,
            "drain": self._drain,
        }
        self._world.at(fault.at, lambda: self._do(fault, actions[fault.kind]), is_plane=False)

    def _do(self, fault: Fault, action: Callable[[Fault], None]) -> None:
        self._world.counts[f"fault {fault.kind}"] += 1
        self._world.log("fault", f"{fault.kind} {fault.worker}", lambda: fault)
        action(fault)

    def _start(self, spec: WorkerSpec) -> None:
        worker = Worker(self._site, spec, len(self.lives) + 1, self._gateway.outbox)
        self.lives.append(worker)
        self.workers[spec.name] = worker
        self._gateway.add_worker(worker)

    def _pause(self, fault: Fault) -> None:
        """As SIGSTOP does: its clock runs on, and what arrives meanwhile waits."""
        worker, name = self.workers[fault.worker], fault.worker
        if worker.is_dead:
            return
        worker.paused_until = self._world.now + fault.duration_s
        worker.paused_s += fault.duration_s
        if fault.duration_s > self._peer_timeout_s:
            self._later(self._peer_timeout_s, lambda: self._gateway.note_silence(name))
            self._later(fault.duration_s, lambda: self._gateway.hear_again(name))

    def _crash(self, fault: Fault) -> None:
        """As SIGKILL does; it comes back at the same address as somebody else."""
        worker = self.workers[fault.worker]
        if worker.is_dead:
            return
        worker.is_dead = True
        noticed_s = self._world.between(0.0, self._peer_timeout_s)
        self._later(min(noticed_s, fault.duration_s), lambda: self._gateway.lose(fault.worker, "killed"))
        self._later(fault.duration_s, lambda: self._start(self._specs[fault.worker]))

    def _drain(self, fault: Fault) -> None:
        """It takes nothing new, gives back what has not ended in time, and is restarted, or takes requests again."""
        worker = self.workers[fault.worker]
        if worker.is_dead or worker.is_draining:
            return
        worker.is_draining = True
        heard_s = self._world.between(0.0, MAX_HEARTBEAT_S)
        self._later(heard_s, lambda: self._gateway.hear(worker))
        self._later(fault.duration_s / 2, worker.give_back)
        self._later(fault.duration_s, lambda: self._end_drain(worker, is_restart=fault.is_mutual))

    def _end_drain(self, worker: Worker, *, is_restart: bool) -> None:
        if worker.is_dead:
            return
        worker.is_draining = False
        if not is_restart:
            self._gateway.hear(worker)
        elif worker.paused_until <= self._world.now:
            self._world.counts["fault restarted"] += 1
            worker.is_dead = True
            self._start(self._specs[worker.name])

    def _part(self, fault: Fault) -> None:
        until = self._world.now + fault.duration_s
        partitions = self._site.network.partitions
        partitions[fault.worker, fault.peer] = until
        if fault.is_mutual:
            partitions[fault.peer, fault.worker] = until

    def _disconnect(self, fault: Fault) -> None:
        """What gateway and worker say to each other is lost. Each end may notice, or not: only long silence is sure."""
        name = fault.worker
        self._gateway.cut_off(name)
        if self._world.chance(0.3):  # the worker's heartbeat finds no connection
            self._later(self._world.between(0.0, fault.duration_s), self.workers[name].lose_gateway)
        if fault.duration_s > self._peer_timeout_s:
            self._later(self._peer_timeout_s, self.workers[name].lose_gateway)
            self._later(self._peer_timeout_s, lambda: self._gateway.note_silence(name))
        self._later(fault.duration_s, lambda: self._gateway.reconnect(name))

    def _fail_device(self, fault: Fault) -> None:
        self.workers[fault.worker].runner.must_fail = True

    def _reset(self, fault: Fault) -> None:
        """Preempts everybody who runs, and forgets what could be hit."""
        self.workers[fault.worker].reset_prefix_cache()

    def _break_reads(self, fault: Fault) -> None:
        """Some of the reads that are under way fail, and the others go on."""
        for reader in self.workers[fault.worker].readers.values():
            reader.break_reads()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._world.after(delay_s, action, is_plane=False)
