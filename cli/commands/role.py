"""`baton role`: changes the role of a running worker; weights and prefix cache stay."""

import asyncio
import json
from collections.abc import Callable

from baton.worker import WorkerRole
from cli.commands.operator_calls import carry_out, of_worker, running_command
from cli.target import Target


def run(target: Target, worker: str, role: str, as_json: bool) -> int:
    """Returns once the worker serves in its new role.

    Raises GatewayError if the worker keeps its old role.
    """
    with running_command("role", f"{worker} becomes a {role} worker", as_json) as stage:
        total_s = asyncio.run(_set_role(target, worker, WorkerRole(role), stage.say))
        stage(f"{worker} serves as a {role} worker")
    if as_json:
        print(json.dumps({"worker": worker, "role": role, "total_s": total_s}))
    return 0


async def _set_role(target: Target, worker: str, role: WorkerRole, say: Callable[[str], None]) -> float:
    async with target.client() as client:
        return await carry_out(client.set_role(worker, role), client, of_worker(worker), say)
