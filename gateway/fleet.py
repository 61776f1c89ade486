"""Fleet: the workers a gateway knows, and which of them take requests."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable

import zmq.asyncio

from baton.config import NetworkConfig
from baton.curve import PlaneKeys
from baton.errors import WorkerUnavailable
from baton.request import RequestOutput
from baton.worker import WorkerEndpoint, WorkerRole, WorkerState
from gateway.router import Candidate
from gateway.worker_client import REFUSED, WorkerClient

logger = logging.getLogger(__name__)


class Fleet:
    """Workers join by `add` and leave by `remove` or when their life ends; silence only keeps requests from them.

    `on_lost` is told of each one whose requests cannot be waited for any longer.
    """

    def __init__(
        self,
        network: NetworkConfig,
        keys: PlaneKeys | None,
        on_outputs: Callable[[str, tuple[RequestOutput, ...]], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self._network = network
        self._keys = keys
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._identity = secrets.token_bytes(16)
        self._context = zmq.asyncio.Context()
        self._clients: dict[str, WorkerClient] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.num_legs: Counter[str] = Counter()
        """Legs of our own requests by worker: known at once, unlike what heartbeats say."""

    def add(self, endpoint: WorkerEndpoint) -> None:
        """Connects to a worker. One of the same name is replaced: it is a new life of it."""
        self.remove(endpoint.ref.name, "replaced")
        client = WorkerClient(
            endpoint,
            self._context,
            self._identity,
            self._network,
            self._keys,
            self._on_outputs,
            self._note_loss,
        )
        self._clients[client.name] = client
        self._tasks[client.name] = asyncio.create_task(self._watch(client))

    def remove(self, name: str, reason: str) -> None:
        """Forgets a worker; unknown names are no error."""
        if name in self._clients:
            del self._clients[name]
            self._tasks.pop(name).cancel()
            self._on_lost(name, reason)

    def client(self, name: str) -> WorkerClient | None:
        return self._clients.get(name)

    @property
    def clients(self) -> list[WorkerClient]:
        return sorted(self._clients.values(), key=lambda client: client.name)

    async def wait_for(self, name: str) -> None:
        """Returns with the worker's first heartbeat, or when it stays silent, is lost or unknown.

        WorkerUnavailable if it refuses the connection: unlike silence, that does not pass.
        """
        if client := self.client(name):
            await client.first_sign.wait()
            if client.is_refused:
                raise WorkerUnavailable(f"worker {name} at {client.endpoint.request_address}: {REFUSED}")

    def candidates(self, role: WorkerRole) -> list[Candidate]:
        """Workers of this role that were heard of and take requests."""
        return [
            Candidate(client.name, self._num_requests(client))
            for client in self._clients.values()
            if client.status is not None
            and not client.is_silent
            and client.status.role is role
            and client.status.state is WorkerState.READY
        ]

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._clients.clear()
        self._tasks.clear()
        self._context.term()

    async def _watch(self, client: WorkerClient) -> None:
        reason = await client.run()
        if self._clients.get(client.name) is client:
            logger.warning("worker %s is lost: %s", client.name, reason)
            del self._clients[client.name]
            del self._tasks[client.name]
            self._on_lost(client.name, reason)

    def _note_loss(self, name: str, reason: str) -> None:
        """What the worker had is tried elsewhere; it gets new requests as soon as it is heard again."""
        logger.warning("what worker %s had is lost: %s", name, reason)
        self._on_lost(name, reason)

    def _num_requests(self, client: WorkerClient) -> int:
        assert client.status is not None
        counts = client.status.requests
        told = counts.running + counts.waiting + counts.waiting_for_remote_kvs
        return max(told, self.num_legs[client.name])
