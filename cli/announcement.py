"""The output of a ready gateway: example commands for people, addresses for programs."""

import asyncio
import json
import shlex

from rich.text import Text

from cluster.serve.following_gateway import Service, WhileReady
from cluster.serve.screen import Screen


def serving(screen: Screen, as_json: bool) -> WhileReady:
    """Prints the announcement of the gateway, and then waits until it is cancelled."""

    async def while_ready(service: Service) -> None:
        announce(service, screen)
        if as_json:
            print(ready_line(service), flush=True)
        await asyncio.Event().wait()  # until a signal cancels it

    return while_ready


def announce(service: Service, screen: Screen) -> None:
    """Prints the line that says the gateway is ready, and example commands."""
    chat = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    addresses = Text.assemble("gRPC on ", (service.target, "green"))
    url = f"{'https' if service.uses_tls else 'http'}://{service.http}"
    if service.http is not None:
        addresses.append_text(Text.assemble(", HTTP on ", (url, "green")))
    screen.line("ready", addresses.append(" (Ctrl-C stops)"))
    flags = (" --tls" if service.uses_tls else "") + (" --api-key-file FILE" if service.asks_for_key else "")
    screen.line("", f'baton generate --target {service.target}{flags} "Why is the sky blue?"')
    key = " -H 'authorization: Bearer KEY'" if service.asks_for_key else ""
    flags = ("" if service.uses_tls else " -plaintext") + key
    body = shlex.quote(json.dumps({"chat": chat}))
    screen.line("", f"grpcurl{flags} -d {body} {service.target} baton.v1.GenerationService/Generate")
    if service.http is not None:
        body = shlex.quote(json.dumps({"model": service.model} | chat))
        screen.line("", f"curl {url}/v1/chat/completions{key} -H 'content-type: application/json' -d {body}")


def ready_line(service: Service) -> str:
    """One JSON line for programs that start a deployment: its addresses, and the processes of its workers."""
    workers = [
        {"name": e.ref.name, "role": e.role.value, "pid": e.pid, "request_address": e.request_address}
        for e in service.endpoints
    ]
    return json.dumps({"target": service.target, "http": service.http, "workers": workers})
