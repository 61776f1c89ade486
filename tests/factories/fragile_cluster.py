"""A cluster whose workers a test may kill, stop and replace: real processes and the real gateway."""

import asyncio
import json
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from sys import executable
from typing import Any

from baton.config import BatonConfig
from baton.worker import WorkerEndpoint, WorkerRole
from cluster.controller.desired import worker_names
from cluster.serve.gateway import make_gateway
from gateway import Gateway, GatewayClient, Tokenizer
from tests.factories.security import KEYS
from worker.ready_line import endpoint_from_json

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 90.0
OnBegun = Callable[["FragileWorker"], Awaitable[None]]
THREADS = {"device", "engine", "kv-transfer", "request-plane"}


class FragileWorker:
    """One process of tests/factories/warm_worker.py. `endpoint` is set once it has begun."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log
        self.endpoint: WorkerEndpoint | None = None
        self._asking = asyncio.Lock()

    @property
    def ports(self) -> tuple[int, int]:
        """Ports of the KV plane and of the request plane, in the order in which a worker binds them."""
        assert self.endpoint is not None
        addresses = [self.endpoint.ref.kv_addresses[0], self.endpoint.request_address]
        kv, request = [int(re.sub(r".*:", "", address)) for address in addresses]
        return kv, request

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    async def begin(self, role: WorkerRole, name: str, ports: Sequence[int] = ()) -> WorkerEndpoint:
        """Starts the worker; it serves when this returns."""
        line = await self._ask({"role": role.value, "name": name, "ports": list(ports)}, START_TIMEOUT_S)
        self.endpoint = endpoint_from_json(line)
        return self.endpoint

    async def describe(self) -> dict[str, Any]:
        description: dict[str, Any] = json.loads(await self._ask("describe", ANSWER_TIMEOUT_S))
        return description

    async def wait_until_warm(self) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            assert self.process.stdout is not None
            assert await self.process.stdout.readline() == b'"warm"\n', self.log.read_text()

    async def kill(self) -> None:
        """Ends the process with `kill -9`. Nothing of it is left when this returns."""
        self.process.kill()
        await self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    async def hang(self) -> None:
        """Makes its steps hang. From now on no step ends, but all other threads continue."""
        await self._ask("hang", ANSWER_TIMEOUT_S)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def _ask(self, question: object, timeout_s: float) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        async with self._asking, asyncio.timeout(timeout_s):
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            line = await self.process.stdout.readline()
        assert line, (
            f"worker {self.process.pid} ended with {await self.process.wait()}:\n{self.log.read_text()}"
        )
        return line.decode()


class FragileCluster:
    """Workers by name, a gateway that learns about them as from a supervisor, and warm spare processes."""

    def __init__(
        self,
        config: BatonConfig,
        gateway: Gateway,
        client: GatewayClient,
        command: list[str],
        folder: Path,
        on_begun: OnBegun | None,
    ) -> None:
        """`command` starts a process of warm_worker.py. `folder` gets the logs."""
        self.gateway = gateway
        self.client = client
        self.workers: dict[str, FragileWorker] = {}
        self.processes: list[FragileWorker] = []
        """All processes that were ever started."""
        self._roles = dict(worker_names(config.cluster))
        self._command = command
        self._folder = folder
        self._on_begun = on_begun
        self._num_started = 0
        self._spares: list[FragileWorker] = []

    async def begin(self) -> None:
        warm = await asyncio.gather(*[self.warm_up() for _ in self._roles])
        self.workers = dict(zip(self._roles, warm, strict=True))
        for endpoint in [await self._begin(worker, name) for name, worker in self.workers.items()]:
            self.gateway.workers.add_worker(endpoint)
        await asyncio.gather(*[self.gateway.workers.wait_for_worker(name) for name in self._roles])

    async def warm_up(self) -> FragileWorker:
        """A process that has imported everything and waits for its command."""
        self._num_started += 1
        log = self._folder / f"worker-{self._num_started}.log"
        pipe = asyncio.subprocess.PIPE
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=stderr
            )
        worker = FragileWorker(process, log)
        self.processes.append(worker)
        await worker.wait_until_warm()
        return worker

    async def prepare_spares(self, number: int) -> None:
        """Prepares warm processes; `number` are ready when this returns."""
        missing = range(number - len(self._spares))
        self._spares += await asyncio.gather(*[self.warm_up() for _ in missing])

    async def replace(self, name: str, ports: Sequence[int] = ()) -> None:
        """Starts a new incarnation of a killed worker, and notifies the gateway as a supervisor would."""
        worker = self._spares.pop() if self._spares else await self.warm_up()
        endpoint = await self._begin(worker, name, ports)
        self.workers[name] = worker
        self.gateway.workers.add_worker(endpoint)
        await self.gateway.workers.wait_for_worker(name)

    async def descriptions(self) -> dict[str, dict[str, Any]]:
        """The state of every live worker, as the worker itself reports it."""
        live = {name: worker for name, worker in self.workers.items() if worker.is_alive}
        answers = await asyncio.gather(*[worker.describe() for worker in live.values()])
        return dict(zip(live, answers, strict=True))

    async def _begin(self, worker: FragileWorker, name: str, ports: Sequence[int] = ()) -> WorkerEndpoint:
        endpoint = await worker.begin(self._roles[name], name, ports)
        if self._on_begun is not None:
            await self._on_begun(worker)
        return endpoint

    async def end(self) -> None:
        for worker in self.processes:
            if worker.is_alive:
                worker.go_on()  # a stopped process would not end
                await worker.kill()


def unrest(description: dict[str, Any]) -> list[str]:
    """The reasons why a worker is not idle and healthy; empty if it is."""
    blocks = description["kv_blocks"]
    found = [f"{name} is missing" for name in sorted(THREADS - set(description["threads"]))]
    if description["state"] != "ready":
        found.append(f"it is {description['state']}")
    if blocks["free"] != blocks["total"] or blocks["leased"] or blocks["quarantined"]:
        found.append(f"blocks: {blocks}")
    if any(description["requests"].values()):
        found.append(f"requests: {description['requests']}")
    if description["num_transfers"]:
        found.append(f"{description['num_transfers']} hand-overs are not over")
    return found


@asynccontextmanager
async def fragile_cluster(
    config: BatonConfig,
    model_path: Path,
    on_begun: OnBegun | None = None,
    worker_options: Sequence[str] = (),
) -> AsyncIterator[FragileCluster]:
    """A cluster of `cluster.prefill` + `cluster.decode` processes with these options; see warm_worker.py.

    The gateway learns about a worker after `on_begun`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values = config.model_dump(exclude_unset=True)
        values.setdefault("model", {})["path"] = str(model_path)
        # A restarted worker listens on its previous ports, and on no other port.
        values.setdefault("network", {})["metrics_port"] = None
        (folder / "baton.json").write_text(json.dumps(values))  # JSON is YAML
        command = [executable, "-m", "tests.factories.warm_worker", "--config", str(folder / "baton.json")]
        command += worker_options
        gateway = make_gateway(config, KEYS, model_path, Tokenizer(model_path))
        await gateway.start()
        async with GatewayClient(f"127.0.0.1:{gateway.grpc_port}") as client:
            cluster = FragileCluster(config, gateway, client, command, folder, on_begun)
            try:
                await cluster.begin()
                yield cluster
            finally:
                await gateway.stop(grace_s=1.0)
                await cluster.end()
