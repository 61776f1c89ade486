"""`baton serve`: a deployment that stays until Ctrl-C, and says how to talk to it."""

import asyncio
import json
import logging
import shlex

from rich.console import Console

from baton.config import BatonConfig
from cluster.deployment import Service, run_deployment
from cluster.screen import Screen


def run(config: BatonConfig, as_json: bool) -> int:
    """Serves until SIGINT or SIGTERM. Progress goes to stderr; stdout gets one JSON line when ready, if asked for."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    screen = Screen(Console(stderr=True))

    async def while_ready(service: Service) -> None:
        announce(service, screen)
        if as_json:
            print(ready_line(service), flush=True)
        await asyncio.Event().wait()  # until a signal cancels it

    run_deployment(config, screen, while_ready)
    screen.line("stopped", "everything it started is gone")
    return 0


def announce(service: Service, screen: Screen) -> None:
    """The ready line, and two ways to use it."""
    body = json.dumps({"chat": {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}})
    screen.line("ready", f"[green]{service.target}[/] (Ctrl-C stops)")
    screen.line("", f'baton generate --target {service.target} "Why is the sky blue?"')
    screen.line(
        "", f"grpcurl -plaintext -d {shlex.quote(body)} {service.target} baton.v1.GenerationService/Generate"
    )


def ready_line(service: Service) -> str:
    """For programs that start a deployment: where it is, and its workers' processes."""
    workers = [
        {"name": e.ref.name, "role": e.role.value, "pid": e.pid, "request_address": e.request_address}
        for e in service.endpoints
    ]
    return json.dumps({"target": service.target, "workers": workers})
