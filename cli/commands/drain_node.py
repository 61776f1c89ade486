"""`baton drain --node`: empties a node of workers; asks a gateway, or the control server of a fleet."""

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
from cli.commands.operator_calls import ordering
from cli.target import Target
from cluster.control_api.zmq_carrier import control_client

_ASK_AGAIN_S = 1.0
"""A control server that is unreachable may be restarting, and the command may be given twice."""


def run(ask: Target | str, node: str, timeout_s: float, network: NetworkConfig, as_json: bool) -> int:
    """Returns once the node has no workers. GatewayError, FleetError and ClusterError say why it has.

    `ask` is a gateway, or the address of a control server, which takes the cluster's secret of `network`.
    """
    began = time.monotonic()
    with ordering("drain", f"workers leave node {node}", as_json) as stage:
        asyncio.run(_bounded(ask, node, timeout_s, network))
        stage(f"node {node} has no workers, and gets none")
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
            f"the workers of node {node} did not leave it within {timeout_s:g} s (--timeout); if they were told to, "
            "they go on leaving"
        ) from None


async def _at_control_server(address: str, node: str, timeout_s: float, network: NetworkConfig) -> None:
    keys = derive_fleet_keys(load_secret(network, os.environ, may_create=False))
    async with control_client(address, keys, network) as (client, carrier):
        while True:
            with suppress(ClusterError):
                await client.call(DrainNode(node, timeout_s))
                return
            if carrier.refusal is not None:
                raise ClusterError(f"the fleet at {address} is not ours: {carrier.refusal}")
            await asyncio.sleep(_ASK_AGAIN_S)
