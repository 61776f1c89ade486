"""HTTP as a stranger speaks it: one call on a connection of its own, and how long /health takes meanwhile."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

CALL_TIMEOUT_S = 120.0
LOOK_INTERVAL_S = 0.02


async def post(address: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body. OSError if there is none."""
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
    """How /health was answered."""

    worst_s: float = 0.0
    num_calls: int = 0
    num_failed: int = 0


@contextmanager
def watched_health(address: str) -> Iterator[Health]:
    """Asks /health all the time, from a thread of its own."""
    health, is_over = Health(), threading.Event()
    thread = threading.Thread(target=_watch, args=(address, health, is_over))
    thread.start()
    try:
        yield health
    finally:
        is_over.set()
        thread.join()


def _watch(address: str, health: Health, is_over: threading.Event) -> None:
    connection = http.client.HTTPConnection(address, timeout=CALL_TIMEOUT_S)
    while not is_over.wait(LOOK_INTERVAL_S):
        began = time.monotonic()
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
            health.num_calls += 1
        except OSError:
            health.num_failed += 1
            connection.close()
        health.worst_s = max(health.worst_s, time.monotonic() - began)
    connection.close()
