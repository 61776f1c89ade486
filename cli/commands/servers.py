"""`baton serve`, `baton fleet` and `baton gateway`: run until Ctrl-C, and say when they are ready.

Progress goes to stderr, with example commands for people. With `as_json`, the command also prints one line of JSON to
stdout once it is ready: its addresses, for programs.
"""

import asyncio
import json
import shlex
from collections.abc import Callable

from rich.text import Text

from baton.config import BatonConfig
from baton.system.hosts import WILDCARDS, host_of
from baton.system.logs import write_logs
from cli.console import service_console
from cluster.serve.following_gateway import Service, WhileReady
from cluster.serve.joining import run_gateway
from cluster.serve.run import OpenFleet, run_deployment, run_fleet
from cluster.serve.screen import Screen


def serve(config: BatonConfig, as_json: bool) -> int:
    """Runs a deployment until SIGINT, SIGTERM or SIGHUP."""
    write_logs(config.logging, component="gateway", fleet=config.cluster.name)
    screen = Screen(service_console())
    run_deployment(config, screen, serving(screen, as_json))
    screen.line("stopped", "all processes of this deployment have ended")
    return 0


def serve_fleet(config: BatonConfig, as_json: bool, reread: Callable[[], BatonConfig]) -> int:
    """Runs workers and their controller for gateways elsewhere, until SIGINT, SIGTERM or SIGHUP.

    `reread` returns the current content of the configuration.
    """
    write_logs(config.logging, component="fleet", fleet=config.cluster.name)
    screen = Screen(service_console())

    async def while_open(fleet: OpenFleet) -> None:
        address = (fleet.address, "green")
        screen.line("ready", Text.assemble("gateways find this fleet at ", address, " (Ctrl-C stops)"))
        secret = [] if config.network.secret_file is None else ["--secret-file", config.network.secret_file]
        screen.line("", shlex.join(["baton", "gateway", "--fleet-address", fleet.address, *secret]))
        if as_json:
            workers = [{"name": e.ref.name, "role": e.role.value, "pid": e.pid} for e in fleet.endpoints]
            print(json.dumps({"fleet": fleet.address, "workers": workers}), flush=True)
        await asyncio.Event().wait()  # until a signal cancels it

    run_fleet(config, screen, while_open, reread)
    screen.line("stopped", "all processes of this fleet have ended")
    return 0


def serve_gateway(config: BatonConfig, as_json: bool) -> int:
    """Runs one more gateway of a running fleet until SIGINT, SIGTERM or SIGHUP. The fleet then continues without it."""
    write_logs(config.logging, component="gateway", fleet=config.cluster.name)
    screen = Screen(service_console())
    has_found_fleet = False

    async def while_ready(service: Service) -> None:
        nonlocal has_found_fleet
        has_found_fleet = True
        await serving(screen, as_json)(service)

    run_gateway(config, screen, while_ready)
    screen.line(
        "stopped", "the fleet continues without this gateway" if has_found_fleet else "no fleet was found"
    )
    return 0


def serving(screen: Screen, as_json: bool) -> WhileReady:
    """Prints the announcement of the gateway, and then waits until it is cancelled."""

    async def while_ready(service: Service) -> None:
        announce(service, screen)
        if as_json:
            workers = [
                {"name": e.ref.name, "role": e.role.value, "pid": e.pid, "request_address": e.request_address}
                for e in service.endpoints
            ]
            ready = {"target": service.target, "http": service.http, "workers": workers}
            print(json.dumps(ready), flush=True)
        await asyncio.Event().wait()  # until a signal cancels it

    return while_ready


def announce(service: Service, screen: Screen) -> None:
    """Prints the line that says the gateway is ready, and example commands. These limit the answer: at a temperature of
    1, a small model may fill its whole context."""
    limit = {"max_tokens": 256}  # as in `baton generate`
    chat = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    scheme = "https" if service.uses_tls else "http"
    addresses = Text.assemble("gRPC on ", (service.target, "green"))
    if service.http is not None:
        addresses.append_text(Text.assemble(", HTTP on ", (f"{scheme}://{service.http}", "green")))
    screen.line("ready", addresses.append(" (Ctrl-C stops)"))
    target = _to_connect_to(service.target)
    flags = (
        (" --tls" if service.uses_tls else "")
        + (" --tls-cert FILE --tls-key FILE" if service.asks_for_certificate else "")
        + (" --api-key-file FILE" if service.asks_for_key else "")
    )
    screen.line("", f'baton generate --target {target}{flags} "Why is the sky blue?"')
    key = " -H 'authorization: Bearer KEY'" if service.asks_for_key else ""
    certificate = " -cert FILE -key FILE" if service.asks_for_certificate else ""
    flags = ("" if service.uses_tls else " -plaintext") + certificate + key
    body = shlex.quote(json.dumps({"chat": chat, "sampling_params": limit}))
    screen.line("", f"grpcurl{flags} -d {body} {target} baton.v1.GenerationService/Generate")
    if service.http is not None:
        url = f"{scheme}://{_to_connect_to(service.http)}/v1/chat/completions"
        body = shlex.quote(json.dumps({"model": service.model} | limit | chat))
        certificate = " --cert FILE --key FILE" if service.asks_for_certificate else ""
        screen.line("", f"curl {url}{certificate}{key} -H 'content-type: application/json' -d {body}")


def _to_connect_to(address: str) -> str:
    """The address at which a client on this machine reaches a gateway that listens on `address`. No certificate names a
    wildcard."""
    return f"localhost:{address.rpartition(':')[2]}" if host_of(address) in WILDCARDS else address
