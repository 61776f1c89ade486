"""The fleet that the faults hit: how it is started, and when it counts as complete again."""

import asyncio
import time
from typing import Any

import psutil

from engine.native.library import native_library
from gateway.client import GatewayClient, GatewayError
from tests.chaos.machines import Machines

HEAL_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
OUR_ACTORS = ("ray::Worker", "ray::Controller")
"""How Ray names their processes."""


def serve_flags(address: str, model: str, num_prefill: int, num_decode: int) -> list[str]:
    """The flags for `baton serve`. PyTorch's kernels compute in float32: their last bits differ between a prompt and
    an answer, and rounding to 16 bits would enlarge the differences. Baton's own kernels give the same bits."""
    flags = {
        "--ray-address": address,
        "--model": model,
        "--dtype": "float32" if native_library() is None else "auto",
        "--prefill": num_prefill,
        "--decode": num_decode,
        "--num-threads": 1,
        "--num-blocks": 600,
    }
    return [str(part) for flag in flags.items() for part in flag]


async def until_healed(
    client: GatewayClient, num_workers: int, *, at_rest: bool = True
) -> tuple[float, list[str]]:
    """Waits until every worker serves and, with `at_rest`, has no work. Returns the seconds until then, and what is
    still missing."""
    began = time.monotonic()
    while True:
        try:
            description = await client.describe()
            unrest = _missing(description, num_workers)
            unrest += _unrest(description) if at_rest else []
        except GatewayError as error:
            unrest = [str(error)]
        elapsed_s = time.monotonic() - began
        if not unrest or elapsed_s > HEAL_TIMEOUT_S:
            return elapsed_s, unrest
        await asyncio.sleep(0.25)


async def watch_absences(client: GatewayClient, absences: list[tuple[float, float]]) -> None:
    """Records the time in which no decode worker is ready, in short pieces, until it is cancelled."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.25)
        try:
            workers = (await client.describe())["workers"]
        except GatewayError:
            continue
        if not any(worker["role"] == "decode" and worker["state"] == "ready" for worker in workers):
            absences.append((began, time.monotonic()))


def _missing(description: dict[str, Any], num_workers: int) -> list[str]:
    """What the fleet lacks to be complete."""
    workers = description["workers"]
    found = [f"{worker['name']} is {worker['state']}" for worker in workers if worker["state"] != "ready"]
    if len(workers) != num_workers:
        found.append(f"{len(workers)} workers instead of {num_workers}")
    return found


def _unrest(description: dict[str, Any]) -> list[str]:
    """The reasons why the fleet is not at rest."""
    found = []
    for worker in description["workers"]:
        blocks, requests = worker["kv_blocks"], worker["requests"]
        if blocks["free"] != blocks["total"] or blocks["leased"] or blocks["quarantined"]:
            found.append(f"{worker['name']} holds blocks: {blocks}")
        if any(requests.values()):
            found.append(f"{worker['name']} has requests: {requests}")
    if description["gateway"]["in_flight"] or description["gateway"]["queued"]:
        found.append(f"the gateway is busy: {description['gateway']}")
    return found


def actors_left(machines: Machines) -> list[str]:
    """Baton's processes that still exist after `baton serve` has ended."""
    actors = [process for process in machines.processes() if _title(process).startswith(OUR_ACTORS)]
    _, alive = psutil.wait_procs(actors, timeout=STOP_TIMEOUT_S)
    return [_title(process) for process in alive]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
