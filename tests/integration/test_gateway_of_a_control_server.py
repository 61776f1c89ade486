"""`baton gateway --fleet-address` as a process: without Ray or torch, and through an absence of the control server."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from baton.config import BatonConfig
from baton.system.secret import SECRET_VARIABLE
from baton.worker import WorkerRole
from gateway import GatewayClient
from tests.factories.control_api import StandingFleet, control_server, packed, port_of
from tests.factories.gateway import ScriptedWorker, answering
from tests.factories.models import make_model_dir
from tests.factories.security import SECRET
from tests.factories.serving import OPTIONS, ServeProcess, running

ANSWER = [7, 8, 9]

# A machine without Ray; and with torch, which must not be imported all the same.
PROGRAM = """
import sys
sys.modules["ray"] = None
from cli.main import main
code = main(sys.argv[1:])
assert sys.modules["torch"] is None, "a module imported torch"
sys.exit(code)
"""


def gateway_of(address: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, "gateway", *OPTIONS, "--fleet-address", address]


async def ask(client: GatewayClient) -> list[int]:
    tokens: list[int] = []
    async for event in client.generate(token_ids=[5, 6, 7], sampling={"max_tokens": 3, "ignore_eos": True}):
        tokens += event.token_ids
    return tokens


async def controller_becomes(client: GatewayClient, state: str) -> dict[str, Any]:
    while (description := await client.describe())["controller"]["state"] != state:
        await asyncio.sleep(0.05)
    return description


async def test_a_gateway_without_ray_follows_a_fleet_through_its_control_servers_absence(
    tmp_path: Path,
) -> None:
    model = make_model_dir(tmp_path / "tiny")
    sections = {
        "model": {"path": str(model)},
        "network": {"peer_timeout_s": 30.0},
        "cluster": {"name": "blue"},
    }
    config = BatonConfig.from_mapping(sections)
    workers = [ScriptedWorker("w0", WorkerRole.PREFILL, answering(ANSWER))]
    workers += [ScriptedWorker("w1", WorkerRole.DECODE, answering(ANSWER))]
    fleet = StandingFleet(packed(config, model), *[worker.endpoint for worker in workers])
    try:
        async with control_server(config, None) as server:
            with running(gateway_of(server.address), {SECRET_VARIABLE: SECRET.text}) as gateway:
                # It is there before the fleet is.
                await asyncio.to_thread(gateway.wait_for_text, f"no fleet answers at {server.address}")
                await server.serve(fleet)
                ready = await asyncio.to_thread(gateway.wait_ready)
                async with GatewayClient(ready["target"]) as client:
                    assert await ask(client) == ANSWER
                    assert (await controller_becomes(client, "answering"))["model"] == "tiny"
                    await client.drain("w0")
                    assert fleet.commands == [("drain", "w0")]
                    await _restart_the_server(server, config, fleet, client, gateway)
                assert await asyncio.to_thread(gateway.wait_gone) == 1
                assert gateway.stderr.splitlines()[-1] == "baton gateway: the fleet was ended by its owner"
    finally:
        for worker in workers:
            worker.stop()


async def _restart_the_server(
    server: Any,
    config: BatonConfig,
    fleet: StandingFleet,
    client: GatewayClient,
    gateway: ServeProcess,
) -> None:
    """The server is killed, started again, and then ended properly."""
    server._socket.close()
    await controller_becomes(client, "away")
    assert await ask(client) == ANSWER
    on_port = {"cluster": config.cluster.model_copy(update={"fleet_port": port_of(server)})}
    server._socket.close = lambda: None
    async with control_server(config.model_copy(update=on_port), fleet) as heir:
        await controller_becomes(client, "answering")
        assert await ask(client) == ANSWER
        closing = asyncio.create_task(heir.close(1000.0))
        while gateway.process.poll() is None:
            await asyncio.sleep(0.05)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
