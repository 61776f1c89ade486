"""Shared by the commands of operators that change a fleet: runs a command and shows its progress."""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from cli.console import CommandConsole
from cli.views import words
from cluster.serve.screen import Screen, ScreenStage
from gateway.client import GatewayClient, GatewayError

LOOK_INTERVAL_S = 1.0
"""Pause between two requests for the state of the workers."""


@contextmanager
def running_command(command: str, doing: str, as_json: bool) -> Iterator[ScreenStage]:
    """Shows the command while it runs, and then its outcome; on stderr if stdout is reserved for JSON.

    Ctrl-C ends the wait, not the command.
    """
    screen = Screen(CommandConsole(stderr=as_json))
    try:
        with screen.stage(command, doing) as stage:
            yield stage
    except KeyboardInterrupt:
        left = f"baton {command}: stopped waiting; the fleet still carries it out; see `baton status`"
        print(left, file=sys.stderr)
        raise


async def carry_out(
    call: Coroutine[Any, Any, None],
    client: GatewayClient,
    describe: Callable[[list[dict[str, Any]]], str],
    say: Callable[[str], None],
) -> float:
    """Waits for the call, and shows the workers through `describe` in the meantime.

    Returns the duration in seconds.
    """
    started = time.monotonic()
    looking = asyncio.create_task(_look(client, describe, say))
    try:
        await call
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    return time.monotonic() - started


async def _look(
    client: GatewayClient, describe: Callable[[list[dict[str, Any]]], str], say: Callable[[str], None]
) -> None:
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        try:
            say(describe((await client.describe())["workers"]))
        except GatewayError:
            continue  # the call itself raises the error


def of_worker(name: str) -> Callable[[list[dict[str, Any]]], str]:
    """A function that describes the worker of this name."""
    return lambda workers: "; ".join(map(what_it_has, (w for w in workers if w["name"] == name))) or "gone"


def of_absent(workers: list[dict[str, Any]]) -> str:
    """Describes the workers that do not serve."""
    absent = [worker for worker in workers if worker["state"] != "ready"]
    return "; ".join(f"{worker['name']} {what_it_has(worker)}" for worker in absent) or "all serve"


def what_it_has(worker: dict[str, Any]) -> str:
    """Describes what a worker still has: requests, and blocks that other workers may still read or write."""
    state, requests, blocks = words.state_text(worker).plain, worker["requests"], worker["kv_blocks"]
    if not blocks["total"]:
        return state
    kinds = (f", {blocks[kind]} blocks {kind}" for kind in ("leased", "quarantined") if blocks[kind])
    return f"{state}, {sum(requests.values())} requests{''.join(kinds)}"
