"""HTTP as a stranger speaks it: one call on a connection of its own, and how long /health takes meanwhile."""

import asyncio
import http.client
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

CALL_TIMEOUT_S = 120.0
LOOK_INTERVAL_S = 0.02
SPAWN = multiprocessing.get_context("spawn")


async def post(address: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Posts the body. Returns the status and the body of the answer; raises OSError if there is no answer."""
    return await asyncio.to_thread(_post, address, path, body)


def _post(address: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=CALL_TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@dataclass(slots=True)
class Health:
    """The slowest answer of /health, and the number of failures. Complete after the block."""

    worst_s: float = 0.0
    num_failed: int = 0


@contextmanager
def watched_health(address: str) -> Iterator[Health]:
    """Asks /health all the time, from a separate process, so that standstills of this process do not count."""
    health = Health()
    ours, theirs = SPAWN.Pipe()
    watcher = SPAWN.Process(target=_watch, args=(address, theirs))
    watcher.start()
    try:
        assert ours.recv() == "begun"
        yield health
    finally:
        ours.send("over")
        seen: Health = ours.recv()
        watcher.join()
        health.worst_s, health.num_failed = seen.worst_s, seen.num_failed


def _watch(address: str, pipe: "Connection[Any, Any]") -> None:
    connection = http.client.HTTPConnection(address, timeout=CALL_TIMEOUT_S)
    health = Health()
    pipe.send("begun")
    while not pipe.poll(LOOK_INTERVAL_S):
        began = time.monotonic()
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
        except OSError:
            health.num_failed += 1
            connection.close()
        health.worst_s = max(health.worst_s, time.monotonic() - began)
    connection.close()
    pipe.send(health)
