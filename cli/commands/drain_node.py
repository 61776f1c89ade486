"""`baton drain --node`: removes all workers from a node, through a gateway or the control server of a fleet."""

import asyncio
import json
import os
import time

from baton.config import NetworkConfig
from baton.errors import ClusterError, FleetError
from baton.messages.control import DescribeFleet, DrainNode
from baton.system.curve import derive_fleet_keys
from baton.system.secret import load_secret
from cli.commands.operators import running_command
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
        if isinstance(ask, Target):
            asyncio.run(_at_gateway(ask, node, timeout_s))
        else:
            asyncio.run(_at_control_server(ask, node, timeout_s, network))
        stage(f"node {node} has no workers, and takes none")
    if as_json:
        print(json.dumps({"node": node, "total_s": time.monotonic() - began}))
    return 0


async def _at_gateway(target: Target, node: str, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s), target.client() as client:
            await client.drain_node(node, timeout_s)
    except TimeoutError:
        raise _too_late(node, timeout_s) from None


async def _at_control_server(address: str, node: str, timeout_s: float, network: NetworkConfig) -> None:
    keys = derive_fleet_keys(load_secret(network, os.environ, may_create=False))
    problem = f"the control server at {address} has not answered"
    async with control_client(address, keys, network) as (client, carrier):
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await client.call(DescribeFleet())  # shows that the server answers
                        problem = ""
                        await client.call(DrainNode(node, timeout_s))
                        return
                    except ClusterError as error:
                        problem = str(error)
                    if carrier.refusal is not None:
                        raise ClusterError(f"cannot ask the fleet at {address}: {carrier.refusal}")
                    await asyncio.sleep(_ASK_AGAIN_S)
        except TimeoutError:
            raise _too_late(node, timeout_s, problem) from None


def _too_late(node: str, timeout_s: float, problem: str = "") -> FleetError:
    """`problem`: what the last try to ask for it has met."""
    why = f"; {problem}" if problem else ""
    return FleetError(
        f"the workers of node {node} did not leave it within {timeout_s:g} s (--timeout); if their draining "
        f"has begun, it continues{why}"
    )
