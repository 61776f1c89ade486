"""Faults: carries out the scenario's pauses, crashes, partitions, cuts, drains and device failures."""

import math
from collections.abc import Callable
from functools import partial

from baton.system.progress import ProgressObserver
from gateway.workers.worker_listener import LossCause
from simulator.fleet import SimFleet
from simulator.gateway import SimGateway
from simulator.worker import Site, Worker
from tests.simulation.scenario import Fault, Scenario

MAX_HEARTBEAT_S = 0.05
"""Until a gateway learns of a change."""
LOOK_EVERY_S = 0.25
SLOWNESS = 20
MAX_RETRY_S = 0.2
"""Until a client whose gateway died asks another one."""


class Faults:
    """Plans the faults of a fleet."""

    def __init__(self, site: Site, scenario: Scenario, fleet: SimFleet) -> None:
        self._site = site
        self._world = site.world
        self._fleet = fleet
        self._specs = {spec.name: spec for spec in scenario.workers}
        self._peer_timeout_s = scenario.transfer.peer_timeout_s

    def plan(self, fault: Fault) -> None:
        """The fault happens at its time, but never within a step of an engine."""
        actions: dict[str, Callable[[Fault], None]] = {
            "pause": self._pause,
            "crash": self._crash,
            "partition": self._part,
            "disconnect": self._disconnect,
            "device": self._fail_device,
            "reset": self._reset,
            "break": self._break_reads,
            "drain": self._drain,
            "hang": self._hang,
            "slow": self._slow,
            "spoil": self._spoil,
        }
        self._world.at(fault.at, lambda: self._do(fault, actions[fault.kind]), is_plane=False)

    def plan_gateway_death(self, at: float, gateway: SimGateway) -> None:
        self._world.at(at, lambda: self._end_gateway(gateway), is_plane=False)

    def _do(self, fault: Fault, action: Callable[[Fault], None]) -> None:
        self._world.counts[f"fault {fault.kind}"] += 1
        self._world.log("fault", f"{fault.kind} {fault.worker}", lambda: fault)
        action(fault)

    def _pause(self, fault: Fault) -> None:
        """As SIGSTOP does: the clock runs on, and messages wait."""
        worker, name = self._fleet.workers[fault.worker], fault.worker
        if worker.is_dead:
            return
        until = max(worker.paused_until, self._world.now + fault.duration_s)
        worker.paused_s += until - max(worker.paused_until, self._world.now)
        worker.paused_until = until
        if fault.duration_s > self._peer_timeout_s:
            self._later(
                self._peer_timeout_s, lambda: self._fleet.at_gateways(lambda links: links.note_silence(name))
            )
            self._later(
                fault.duration_s, lambda: self._fleet.at_gateways(lambda links: links.end_silence(name))
            )

    def _crash(self, fault: Fault) -> None:
        """As SIGKILL does; another incarnation starts at the same address."""
        worker = self._fleet.workers[fault.worker]
        if worker.is_dead:
            return
        self._fleet.end(worker)
        noticed_s = self._world.between(0.0, self._peer_timeout_s)
        self._later(
            min(noticed_s, fault.duration_s),
            lambda: self._fleet.at_gateways(lambda links: links.lose(fault.worker, LossCause.DISCONNECTED)),
        )
        self._later(fault.duration_s, lambda: self._fleet.start(self._specs[fault.worker]))

    def _drain(self, fault: Fault) -> None:
        """The worker refuses requests, gives back those that do not end in time, and is restarted, or serves again."""
        worker = self._fleet.workers[fault.worker]
        if worker.is_dead or worker.is_draining:
            return
        worker.is_draining = True
        noticed_s = self._world.between(0.0, MAX_HEARTBEAT_S)
        self._later(noticed_s, lambda: self._fleet.at_gateways(lambda links: links.deliver_heartbeat(worker)))
        self._later(fault.duration_s / 2, worker.give_back)
        self._later(fault.duration_s, lambda: self._end_drain(worker, is_restart=fault.is_mutual))

    def _end_drain(self, worker: Worker, *, is_restart: bool) -> None:
        if worker.is_dead:
            return
        worker.is_draining = False
        if not is_restart:
            self._fleet.at_gateways(lambda links: links.deliver_heartbeat(worker))
        elif worker.paused_until <= self._world.now:
            self._world.counts["fault restarted"] += 1
            self._fleet.end(worker)
            self._fleet.start(self._specs[worker.name])

    def _part(self, fault: Fault) -> None:
        until = self._world.now + fault.duration_s
        partitions = self._site.network.partitions
        partitions[fault.worker, fault.peer] = until
        if fault.is_mutual:
            partitions[fault.peer, fault.worker] = until

    def _disconnect(self, fault: Fault) -> None:
        """Messages between a gateway and a worker are lost. Each end may notice at once, or after long silence."""
        worker, gateway = (
            self._fleet.workers[fault.worker],
            self._fleet.gateways[int(fault.at * 1024) % len(self._fleet.gateways)],
        )
        name, links = worker.name, gateway.links
        links.cut_off(name)
        if self._world.chance(0.3):  # the worker's heartbeat finds no connection
            self._later(self._world.between(0.0, fault.duration_s), lambda: worker.lose_gateway(gateway.name))
        if fault.duration_s > self._peer_timeout_s:
            self._later(self._peer_timeout_s, lambda: worker.lose_gateway(gateway.name))
            self._later(self._peer_timeout_s, lambda: links.note_silence(name))
        self._later(fault.duration_s, lambda: links.reconnect(name))

    def _end_gateway(self, gateway: SimGateway) -> None:
        """As SIGKILL does. Workers notice at their next message, or after long silence; clients ask another gateway."""
        self._world.counts["fault gateway died"] += 1
        self._world.log("fault", f"{gateway.name} dies")
        workers, lost = gateway.die()
        for worker in workers:
            noticed_s = self._world.between(0.0, self._peer_timeout_s)
            self._later(noticed_s, partial(worker.lose_gateway, gateway.name))
        for spec in lost:
            self._world.counts["path asked another gateway"] += 1
            self._later(self._world.between(0.0, MAX_RETRY_S), partial(self._fleet.gateways[0].arrive, spec))

    def _fail_device(self, fault: Fault) -> None:
        self._fleet.workers[fault.worker].runner.must_fail = True

    def _reset(self, fault: Fault) -> None:
        """Preempts every running request, and empties the prefix cache."""
        self._fleet.workers[fault.worker].reset_prefix_cache()

    def _break_reads(self, fault: Fault) -> None:
        """Some of the reads under way fail, the others go on."""
        for reader in self._fleet.workers[fault.worker].readers.values():
            reader.break_reads()

    def _hang(self, fault: Fault) -> None:
        """A step that begins now never ends. The worker's own watch notices, reports it and ends the process."""
        worker = self._fleet.workers[fault.worker]
        if not worker.is_dead and not worker.hangs:
            worker.hangs = True
            observer = ProgressObserver((worker.core.progress,), pace_s=4 * LOOK_EVERY_S)
            self._later(fault.duration_s, lambda: self._end_hanging(worker))
            self._watch(worker, observer, fault.duration_s)

    def _end_hanging(self, worker: Worker) -> None:
        worker.hangs = worker.core.progress.piece is not None

    def _watch(self, worker: Worker, observer: ProgressObserver, restart_s: float) -> None:
        if not worker.hangs:
            return
        if observer.look(worker.clock.now()) is None:
            look_again = partial(self._watch, worker, observer, restart_s)
            self._world.after(LOOK_EVERY_S, look_again, worker, is_plane=False)
            return
        self._world.counts["fault hung"] += 1
        self._fleet.end(worker)
        self._fleet.at_gateways(lambda links: links.lose(worker.name, LossCause.HUNG))
        self._later(restart_s, lambda: self._fleet.start(self._specs[worker.name]))

    def _slow(self, fault: Fault) -> None:
        worker = self._fleet.workers[fault.worker]
        worker.slowness = SLOWNESS
        self._later(fault.duration_s, lambda: setattr(worker, "slowness", 1))

    def _spoil(self, fault: Fault) -> None:
        """One step, or each from now on, computes values that are not finite. In the second case the worker
        drains and is replaced."""
        worker = self._fleet.workers[fault.worker]
        worker.runner.num_spoiled_steps = math.inf if fault.is_mutual else 1
        self._later(fault.duration_s, lambda: self._end_spoiling(worker))

    def _end_spoiling(self, worker: Worker) -> None:
        worker.runner.num_spoiled_steps = 0
        if worker.is_unfit:
            self._end_drain(worker, is_restart=True)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._world.after(delay_s, action, is_plane=False)
