"""`baton fleet`: runs workers and their controller without a gateway, until Ctrl-C.

Gateways elsewhere use the fleet.
"""

import asyncio
import json
from collections.abc import Callable

from rich.text import Text

from baton.config import BatonConfig
from baton.system.logs import write_logs
from cli.console import CommandConsole
from cluster.serve.fleet_run import OpenFleet, run_fleet
from cluster.serve.screen import Screen


def run(config: BatonConfig, as_json: bool, reread: Callable[[], BatonConfig]) -> int:
    """Serves until SIGINT or SIGTERM. Progress goes to stderr; with `as_json`, stdout gets one JSON line when ready.

    `reread` returns the current content of the configuration.
    """
    write_logs(config.logging, component="fleet", fleet=config.cluster.name)
    screen = Screen(CommandConsole(stderr=True))

    async def while_open(fleet: OpenFleet) -> None:
        address = (fleet.address, "green")
        screen.line("ready", Text.assemble("gateways find this fleet at ", address, " (Ctrl-C stops)"))
        screen.line("", f"baton gateway --fleet-address {fleet.address}")
        if as_json:
            print(ready_line(fleet), flush=True)
        await asyncio.Event().wait()  # until a signal cancels it

    run_fleet(config, screen, while_open, reread)
    screen.line("stopped", "all processes of this fleet have ended")
    return 0


def ready_line(fleet: OpenFleet) -> str:
    """One JSON line for programs that start a fleet: its address, and the processes of its workers."""
    workers = [{"name": e.ref.name, "role": e.role.value, "pid": e.pid} for e in fleet.endpoints]
    return json.dumps({"fleet": fleet.address, "workers": workers})
