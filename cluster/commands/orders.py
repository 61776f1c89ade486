"""What `baton drain`, `role` and `rollout` share: an order to the fleet, and how it stands while it is carried out."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from cluster.screen import Screen, Stage
from gateway.client import GatewayClient, GatewayError

LOOK_INTERVAL_S = 1.0
"""Between two looks at how the worker stands."""


@contextmanager
def ordering(command: str, doing: str, as_json: bool) -> Iterator[Stage]:
    """Shows the order while it is carried out, and its outcome as the last line; on stderr if stdout is for JSON."""
    screen = Screen(Console(stderr=as_json))
    with screen.stage(command, doing) as stage:
        yield stage


async def carry_out(
    order: Coroutine[Any, Any, None], client: GatewayClient, worker: str, say: Callable[[str], None]
) -> float:
    """Waits for the order's end, and says meanwhile what the worker still has; seconds it took."""
    started = time.monotonic()
    looking = asyncio.create_task(_look(client, worker, say))
    try:
        await order
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    return time.monotonic() - started


async def _look(client: GatewayClient, worker: str, say: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        try:
            workers = (await client.describe())["workers"]
        except GatewayError:
            continue  # the order itself says what is wrong
        say("; ".join(what_it_has(found) for found in workers if found["name"] == worker) or "it is gone")


def what_it_has(worker: dict[str, Any]) -> str:
    """What stands between a worker and its leave: requests, and blocks that others may still read or write."""
    requests, blocks = worker["requests"], worker["kv_blocks"]
    return (
        f"{worker['state'].replace('_', ' ')}, {sum(requests.values())} requests, {blocks['leased']} blocks leased, "
        f"{blocks['quarantined']} quarantined"
    )
