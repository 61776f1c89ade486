"""A cluster of child processes on this machine, for tests, benchmarks and examples.

Workers, gateway and planes are the same as under Ray; there is no controller.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from baton.config import BatonConfig
from baton.system.cpus import find_machine
from baton.system.curve import derive_keys
from baton.system.secret import load_secret
from cluster.controller.cpu_shares import CpuShares
from cluster.controller.desired import worker_names
from cluster.processes.worker_process import WorkerProcess
from cluster.serve.gateway import make_gateway
from engine.loading.dtype import with_chosen_dtype
from gateway import Gateway, Tokenizer


class ChildProcesses:
    """A running cluster: its gateway, and its workers by name."""

    def __init__(self, gateway: Gateway, workers: dict[str, WorkerProcess]) -> None:
        self.gateway = gateway
        self.workers = workers

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.gateway.grpc_port}"


@asynccontextmanager
async def child_processes(config: BatonConfig, model_path: Path) -> AsyncIterator[ChildProcesses]:
    """A gateway in this event loop, and as many workers as `cluster.prefill` and `cluster.decode` say, until the
    `async with` ends."""
    config = with_chosen_dtype(config, model_path)
    workers: dict[str, WorkerProcess] = {}
    secret = load_secret(config.network, os.environ, may_create=True)
    keys = derive_keys(secret)
    try:
        on_cpu, machine, shares = config.engine.device == "cpu", find_machine(), CpuShares(config)
        for name, role in worker_names(config.cluster):
            share = shares.reserve(name, role, "here", machine, workers) if on_cpu else None
            workers[name] = WorkerProcess(config, model_path, secret, role, name, share=share)
        loading = asyncio.create_task(asyncio.to_thread(Tokenizer, model_path))
        endpoints = await asyncio.gather(
            *[asyncio.to_thread(worker.wait_until_ready) for worker in workers.values()]
        )
        gateway = make_gateway(config, keys, model_path, await loading)
        try:
            await gateway.start()
            for endpoint in endpoints:
                gateway.workers.add_worker(endpoint)
            await asyncio.gather(*[gateway.workers.wait_for_worker(name) for name in workers])
            yield ChildProcesses(gateway, workers)
        finally:
            await gateway.stop(grace_s=1.0)
    finally:
        await asyncio.gather(*[asyncio.to_thread(worker.stop) for worker in workers.values()])
