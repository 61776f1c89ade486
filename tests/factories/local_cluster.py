"""A whole cluster on this machine without Ray: worker processes, a gateway in this event loop, and a client."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton.clock import SystemClock
from baton.config import BatonConfig
from baton.worker import WorkerEndpoint, WorkerRole
from cluster.worker_process import endpoint_from_json
from engine.model_config import read_architecture, read_eos_token_ids
from gateway import Gateway, GatewayClient, ServedModel, Tokenizer
from gateway.client import Completion

START_TIMEOUT_S = 120.0
REST_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole completion."""

    token_ids: tuple[int, ...]
    text: str
    completion: Completion


class WorkerProcess:
    """One worker, started without Ray; lives no longer than this process."""

    def __init__(self, config_path: Path, role: WorkerRole, name: str) -> None:
        command = [sys.executable, "-m", "cluster.worker_process", "--role", role.value, "--name", name]
        self.name = name
        self._process = subprocess.Popen(
            [*command, "--config", str(config_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def endpoint(self) -> WorkerEndpoint:
        """Blocks until the worker serves."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"worker {self.name} ended with {self._process.wait()} before it was ready"
        return endpoint_from_json(line)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self._process.send_signal(number)

    def stop(self) -> int:
        """Closes its stdin, which ends it; returns the exit code."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        return self._process.wait(timeout=30)


class LocalCluster:
    """What a test holds in its hand."""

    def __init__(self, client: GatewayClient, gateway: Gateway, workers: dict[str, WorkerProcess]) -> None:
        self.client = client
        self.gateway = gateway
        self.workers = workers

    async def answer(
        self, token_ids: Sequence[int], mode: Literal["disaggregated", "local"] | None = None, **options: Any
    ) -> Answer:
        """Runs one request to its end; `options` beyond those of `generate` are sampling parameters."""
        known = {name: options.pop(name) for name in ("cache_salt", "request_id") if name in options}
        tokens: list[int] = []
        text = ""
        async for event in self.client.generate(token_ids=token_ids, sampling=options, mode=mode, **known):
            tokens += event.token_ids
            text += event.text
            if event.completion is not None:
                return Answer(tuple(tokens), text, event.completion)
        raise AssertionError("the stream ended without a completion")

    async def at_rest(self) -> dict[str, Any]:
        """Waits until every worker has every block back and nothing to do; fails with how it stands if it does not."""
        async with asyncio.timeout(REST_TIMEOUT_S):
            while True:
                description = await self.client.describe()
                if all(_is_at_rest(worker) for worker in description["workers"]):
                    return description
                await asyncio.sleep(0.05)

    async def counters(self, name: str) -> dict[str, int]:
        description = await self.client.describe()
        return next(worker["counters"] for worker in description["workers"] if worker["name"] == name)


@asynccontextmanager
async def local_cluster(
    config: BatonConfig, folder: Path, scratch: Path, *, prefill: int = 1, decode: int = 1
) -> AsyncIterator[LocalCluster]:
    """Starts everything; afterwards every process has ended by itself, with exit code 0 unless it was killed."""
    path = scratch / "baton.yaml"
    values = config.model_dump()
    values["model"]["path"] = str(folder)
    path.write_text(json.dumps(values))  # JSON is YAML
    names = [(WorkerRole.PREFILL, f"p{i}") for i in range(prefill)] + [
        (WorkerRole.DECODE, f"d{i}") for i in range(decode)
    ]
    workers = {name: WorkerProcess(path, role, name) for role, name in names}
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            endpoints = [await asyncio.to_thread(worker.endpoint) for worker in workers.values()]
        gateway = Gateway(
            config.gateway, config.network, _served_model(folder), Tokenizer(folder), SystemClock()
        )
        await gateway.start()
        try:
            for endpoint in endpoints:
                gateway.add_worker(endpoint)
            async with GatewayClient(f"127.0.0.1:{gateway.grpc_port}") as client:
                cluster = LocalCluster(client, gateway, workers)
                await cluster.at_rest()
                yield cluster
        finally:
            await gateway.stop(grace_s=1.0)
    finally:
        codes = {name: await asyncio.to_thread(worker.stop) for name, worker in workers.items()}
    assert set(codes.values()) <= {0, -signal.SIGKILL}, f"workers ended with {codes}"


def _served_model(folder: Path) -> ServedModel:
    architecture = read_architecture(folder)
    return ServedModel(
        folder.name,
        str(folder),
        architecture.max_position_embeddings,
        architecture.vocab_size,
        read_eos_token_ids(folder),
    )


def _is_at_rest(worker: dict[str, Any]) -> bool:
    blocks, requests = worker["kv_blocks"], worker["requests"]
    has_reported = blocks["total"] > 0
    return bool(has_reported and blocks["free"] == blocks["total"] and not any(requests.values()))
