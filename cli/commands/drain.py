"""`baton drain`: takes a worker out for good, without harm to what it has."""

import asyncio
import json
from collections.abc import Callable

from cli.commands.operator_calls import carry_out, of_worker, ordering
from cli.target import Target


def run(target: Target, worker: str, as_json: bool) -> int:
    """Returns once the worker is gone. GatewayError says why it is not."""
    with ordering("drain", f"{worker} leaves", as_json) as stage:
        total_s = asyncio.run(_drain(target, worker, stage.say))
        stage(f"{worker} is gone")
    if as_json:
        print(json.dumps({"worker": worker, "total_s": total_s}))
    return 0


async def _drain(target: Target, worker: str, say: Callable[[str], None]) -> float:
    async with target.client() as client:
        return await carry_out(client.drain(worker), client, of_worker(worker), say)
