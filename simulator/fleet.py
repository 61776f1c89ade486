"""Fleet: every worker in its latest incarnation, and the gateways."""

from collections.abc import Callable, Sequence

from gateway.workers.worker_listener import LossCause
from simulator.gateway import RequestSpec, SimGateway
from simulator.worker import Site, Worker, WorkerSpec
from simulator.worker_links import WorkerLinks

NOTICED_S, RESTART_S = 0.02, 0.2
"""Delays after a request has ended a worker: until gateways notice, and until the next incarnation starts."""


class SimFleet:
    """Starts and ends workers; every gateway knows all of them."""

    def __init__(self, site: Site, specs: Sequence[WorkerSpec], gateways: Sequence[SimGateway]) -> None:
        self.gateways = gateways
        self.incarnations: list[Worker] = []
        """All incarnations that ever ran."""
        self.workers: dict[str, Worker] = {}
        self._site = site
        self._outboxes = {gateway.name: gateway.links.outbox for gateway in gateways}
        for spec in specs:
            self.start(spec)

    def start(self, spec: WorkerSpec) -> None:
        """Starts a new incarnation, at the same address as the last incarnation of this name."""
        worker = Worker(self._site, spec, len(self.incarnations) + 1, self._outboxes, self._beat)
        self.incarnations.append(worker)
        self.workers[spec.name] = worker
        worker.runner.on_killed = lambda: self._end_by_request(worker)
        self.at_gateways(lambda links: links.add(worker))

    def end(self, worker: Worker) -> None:
        """Ends a worker, as SIGKILL does. Gateways are not notified."""
        worker.is_dead, worker.died_at = True, self._site.world.now
        self._site.pools.report_exit(worker)

    def _end_by_request(self, worker: Worker) -> None:
        """Ends a worker because of a request: its connections break, and another incarnation starts."""
        world, name = self._site.world, worker.name
        self.end(worker)
        world.after(
            NOTICED_S,
            lambda: self.at_gateways(lambda links: links.lose(name, LossCause.DISCONNECTED)),
            is_plane=False,
        )
        world.after(RESTART_S, lambda: self.start(worker.spec), is_plane=False)

    def arrive(self, spec: RequestSpec, number: int) -> None:
        """Sends a client's request to one of the gateways that run."""
        running = [gateway for gateway in self.gateways if not gateway.links.is_dead]
        running[number % len(running)].arrive(spec)

    def _beat(self, worker: Worker) -> None:
        self.at_gateways(lambda links: links.send_heartbeat(worker))

    def at_gateways(self, action: Callable[[WorkerLinks], None]) -> None:
        for gateway in self.gateways:
            action(gateway.links)
