"""`baton drain --node`: removes all workers from a node, through a gateway or the control server of a fleet."""

import asyncio
import json
import os
import time
from contextlib import suppress

from baton.config import NetworkConfig
from baton.errors import ClusterError, FleetError
from baton.messages.control import DrainNode
from baton.system.curve import derive_fleet_keys
from baton.system.secret import load_secret
from cli.commands.operator_calls import running_command
from cli.target import Target
from cluster.control_api.zmq_carrier import control_client

_ASK_AGAIN_S = 1.0
"""Pause between two tries: an unreachable control server may be restarting. Sending the command again is
harmless."""


def run(ask: Target | str, node: str, timeout_s: float, network: NetworkConfig, as_json: bool) -> int:
    """Returns once the node has no workers. Raises GatewayError, FleetError or ClusterError if some remain.

    `ask` is a gateway, or the address of a control server, which needs the cluster secret of `network`.
    """
    began = time.monotonic()
    with running_command("drain", f"draining node {node}", as_json) as stage:
        asyncio.run(_bounded(ask, node, timeout_s, network))
        stage(f"node {node} has no workers, and takes none")
    if as_json:
        print(json.dumps({"node": node, "total_s": time.monotonic() - began}))
    return 0


async def _bounded(ask: Target | str, node: str, timeout_s: float, network: NetworkConfig) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            if isinstance(ask, Target):
                async with ask.client() as client:
                    await client.drain_node(node, timeout_s)
            else:
                await _at_control_server(ask, node, timeout_s, network)
    except TimeoutError:
        raise FleetError(
            f"the workers of node {node} did not leave it within {timeout_s:g} s (--timeout); if their "
            "draining has begun, it continues"
        ) from None


async def _at_control_server(address: str, node: str, timeout_s: float, network: NetworkConfig) -> None:
    keys = derive_fleet_keys(load_secret(network, os.environ, may_create=False))
    async with control_client(address, keys, network) as (client, carrier):
        while True:
            with suppress(ClusterError):
                await client.call(DrainNode(node, timeout_s))
                return
            if carrier.refusal is not None:
                raise ClusterError(f"cannot ask the fleet at {address}: {carrier.refusal}")
            await asyncio.sleep(_ASK_AGAIN_S)
