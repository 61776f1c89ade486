"""`baton drain`: removes a worker for good; its requests end or move to other workers."""

import asyncio
import json
from collections.abc import Callable

from cli.commands.operator_calls import carry_out, of_worker, running_command
from cli.target import Target


def run(target: Target, worker: str, as_json: bool) -> int:
    """Returns once the worker is removed.

    Raises GatewayError with the reason if the worker is not removed.
    """
    with running_command("drain", f"draining {worker}", as_json) as stage:
        total_s = asyncio.run(_drain(target, worker, stage.say))
        stage(f"{worker} is removed")
    if as_json:
        print(json.dumps({"worker": worker, "total_s": total_s}))
    return 0


async def _drain(target: Target, worker: str, say: Callable[[str], None]) -> float:
    async with target.client() as client:
        return await carry_out(client.drain(worker), client, of_worker(worker), say)
