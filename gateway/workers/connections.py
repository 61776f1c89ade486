"""WorkerConnections: a gateway's connections to workers, each for one incarnation."""

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter

import zmq.asyncio

from baton.config import NetworkConfig
from baton.errors import WorkerUnavailable
from baton.system.curve import PlaneKeys
from baton.system.tasks import end_tasks
from baton.worker import WorkerEndpoint, WorkerRole, WorkerStatus
from gateway.turn_budget import SharedTurns
from gateway.workers.worker_client import WorkerClient
from gateway.workers.worker_listener import LossCause, WorkerListener

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.01


class WorkerConnections:
    """All connections of one gateway. `add_worker` connects to a worker. The connection ends at `remove_worker` or
    `worker_died`, or when the worker's incarnation ends. A silent worker stays connected, but gets no requests.
    """

    def __init__(
        self,
        network: NetworkConfig,
        keys: PlaneKeys | None,
        listener: WorkerListener,
    ) -> None:
        self._network = network
        self._keys = keys
        self._listener = listener
        self.losses: Counter[LossCause] = Counter()
        """How many workers were lost since the gateway started, by cause."""
        self._turns = SharedTurns(time.monotonic)
        self._gateway_id = secrets.token_hex(16)
        self._connection_numbers = itertools.count(1)
        self._context = zmq.asyncio.Context()
        self._clients: dict[str, WorkerClient] = {}
        self._tasks: dict[WorkerClient, asyncio.Task[None]] = {}
        """The tasks of all connections whose sockets are open, even of workers that were just removed."""

    def add_worker(self, endpoint: WorkerEndpoint) -> None:
        """Connects to a worker, which gets requests from its first heartbeat on. Replaces an earlier incarnation of
        the same name."""
        self._remove(endpoint.ref.name, LossCause.REPLACED, "replaced")
        client = WorkerClient(
            endpoint,
            self._context,
            self._gateway_id,
            next(self._connection_numbers),
            self._network,
            self._keys,
            self._listener,
            self.losses,
            self._turns,
        )
        self._clients[client.name] = client
        task = self._tasks[client] = asyncio.create_task(self._watch(client))
        task.add_done_callback(lambda _: self._close(client))  # the task may be cancelled before it begins

    def worker_died(self, name: str, reason: str) -> None:
        """Removes a worker whose death the controller has reported. Unknown names are ignored."""
        self._remove(name, LossCause.DIED, reason)

    def remove_worker(self, name: str) -> None:
        """Removes a worker that its controller no longer lists: it gets no more requests, and its running requests
        continue on other workers. Unknown names are ignored."""
        self._remove(name, LossCause.LEFT, "it left the fleet")

    def _remove(self, name: str, cause: LossCause, reason: str) -> None:
        if client := self._clients.pop(name, None):
            self._tasks[client].cancel()
            client.lose(cause, reason)

    def client(self, name: str) -> WorkerClient | None:
        return self._clients.get(name)

    @property
    def clients(self) -> list[WorkerClient]:
        return sorted(self._clients.values(), key=lambda client: client.name)

    @property
    def reachable(self) -> list[WorkerClient]:
        """Workers that are not lost; some may not have sent a heartbeat yet."""
        return [client for client in self.clients if not client.is_lost]

    @property
    def statuses(self) -> list[WorkerStatus]:
        """The latest heartbeats of reachable workers."""
        return [client.status for client in self.reachable if client.status is not None]

    async def wait_for_worker(self, name: str) -> None:
        """Returns at the worker's first heartbeat, or when the worker is lost or unknown.

        Raises WorkerUnavailable if gateway and worker refuse each other, since waiting would not change this.
        """
        if client := self.client(name):
            await client.first_sign.wait()
            if client.refusal is not None:
                raise WorkerUnavailable(
                    f"worker {name} at {client.endpoint.request_address}: {client.refusal}"
                )

    async def wait_for_role(self, name: str, role: WorkerRole) -> None:
        """Returns once the worker reports this role. Also returns if the worker is lost or unknown, or has sent no
        heartbeat yet."""
        while (client := self.client(name)) and client.status and not client.is_lost:
            if client.status.role is role:
                return
            await asyncio.sleep(_CHECK_EVERY_S)

    async def stop(self) -> None:
        while self._tasks:  # workers may come and leave until all connections have ended
            self._clients.clear()
            await end_tasks(*self._tasks.values())
        self._context.term()

    async def _watch(self, client: WorkerClient) -> None:
        try:
            cause, reason = await client.run()
        except Exception as error:  # the worker's requests must not wait for ever
            logger.exception("the connection to worker %s failed", client.name)
            cause, reason = LossCause.DISCONNECTED, f"the connection failed: {error}"
        if self._clients.get(client.name) is client:
            del self._clients[client.name]
            client.lose(cause, reason)

    def _close(self, client: WorkerClient) -> None:
        client.close()
        del self._tasks[client]
