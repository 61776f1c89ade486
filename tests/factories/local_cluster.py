"""A whole cluster of child processes, and a client that waits for complete answers and for rest."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton.config import BatonConfig
from cluster.processes.worker_process import WorkerProcess
from cluster.serve.child_processes import child_processes
from gateway import GatewayClient
from gateway.client import GenerationEnd

REST_TIMEOUT_S = 60.0
HANDING_OVER = {"grpc_port": 0, "http_port": None, "routing_mode": "disaggregated"}
"""The configuration's section `gateway`. Every prompt is handed over, since the decisions of `auto` depend on
times."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete answer."""

    token_ids: tuple[int, ...]
    text: str
    completion: GenerationEnd


class LocalCluster:
    """A running cluster, as a test uses it."""

    def __init__(self, client: GatewayClient, workers: dict[str, WorkerProcess]) -> None:
        self.client = client
        self.workers = workers

    async def answer(
        self, token_ids: Sequence[int], mode: Literal["disaggregated", "local"] | None = None, **options: Any
    ) -> Answer:
        """Runs one request to its end. `options` that `generate` does not have are sampling parameters."""
        names = ("cache_salt", "request_id", "skip_reading_prefix_cache", "max_model_len")
        known = {name: options.pop(name) for name in names if name in options}
        tokens: list[int] = []
        text = ""
        async for event in self.client.generate(token_ids=token_ids, sampling=options, mode=mode, **known):
            tokens += event.token_ids
            text += event.text
            if event.completion is not None:
                return Answer(tuple(tokens), text, event.completion)
        raise AssertionError("the stream ended without a completion")

    async def at_rest(self) -> dict[str, Any]:
        """Waits until nothing is in flight and every live worker is idle with all its blocks, or fails.

        The gateway's own count must be zero, too, since a worker's last heartbeat may be older than the last
        request.
        """
        async with asyncio.timeout(REST_TIMEOUT_S):
            while True:
                description = await self.client.describe()
                live = [worker for worker in description["workers"] if worker["state"] != "dead"]
                if description["gateway"]["in_flight"] == 0 and all(map(_is_at_rest, live)):
                    return description
                await asyncio.sleep(0.05)

    async def counters(self, name: str) -> dict[str, int]:
        description = await self.client.describe()
        counters: dict[str, int] = next(w["counters"] for w in description["workers"] if w["name"] == name)
        return counters


@asynccontextmanager
async def local_cluster(config: BatonConfig, folder: Path) -> AsyncIterator[LocalCluster]:
    """Starts gateway and workers, and ends them at the end of the block."""
    async with child_processes(config, folder) as running, GatewayClient(running.target) as client:
        yield LocalCluster(client, running.workers)


def _is_at_rest(worker: dict[str, Any]) -> bool:
    blocks, requests = worker["kv_blocks"], worker["requests"]
    return bool(blocks["free"] == blocks["total"] > 0 and not any(requests.values()))
