"""`baton drain --node`: removes all workers from a node, through a gateway or the control server of a fleet."""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Coroutine
from typing import Any

from baton.config import NetworkConfig
from baton.errors import ClusterError, FleetError, OtherFleetVersion
from baton.messages.control import DescribeFleet, DrainNode
from baton.system.curve import derive_fleet_keys
from baton.system.secret import load_secret
from cli.commands.operators import running_command
from cli.target import Target
from cluster.control_api.zmq_carrier import control_client

_TIMEOUT_S = 60.0
_ASK_AGAIN_S = 1.0
"""Pause between two tries. There are several tries, since an unreachable control server may be restarting. Sending the
command again is harmless."""


def at_gateway(target: Target, options: argparse.Namespace) -> int:
    """Returns once the node has no workers. Raises GatewayError or FleetError if some remain."""
    return _run(options, _ask_gateway(target, options.node, options.timeout or _TIMEOUT_S))


def at_control_server(address: str, options: argparse.Namespace, network: NetworkConfig) -> int:
    """Like `at_gateway`, with the cluster secret of `network` in place of a key.

    Raises FleetError or ClusterError if some workers remain.
    """
    timeout_s = options.timeout or _TIMEOUT_S
    return _run(options, _ask_control_server(address, options.node, timeout_s, network))


def _run(options: argparse.Namespace, ask: Coroutine[Any, Any, None]) -> int:
    began = time.monotonic()
    with running_command("drain", f"draining node {options.node}", options.json) as stage:
        asyncio.run(ask)
        stage(f"node {options.node} has no workers now, and gets no new ones")
    if options.json:
        print(json.dumps({"node": options.node, "total_s": time.monotonic() - began}))
    return 0


async def _ask_gateway(target: Target, node: str, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s), target.client() as client:
            await client.drain_node(node, timeout_s)
    except TimeoutError:
        raise _too_late(node, timeout_s) from None


async def _ask_control_server(address: str, node: str, timeout_s: float, network: NetworkConfig) -> None:
    keys = derive_fleet_keys(load_secret(network, os.environ, may_create=False))
    problem = f"the control server at {address} has not answered"
    async with control_client(address, keys, network) as client:
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await client.call(DescribeFleet())  # shows that the server answers
                        problem = ""
                        await client.call(DrainNode(node, timeout_s))
                        return
                    except OtherFleetVersion:
                        raise
                    except ClusterError as error:
                        problem = str(error)
                    if (refusal := client.carrier.refusal) is not None:
                        raise ClusterError(f"cannot ask the fleet at {address}: {refusal}")
                    await asyncio.sleep(_ASK_AGAIN_S)
        except TimeoutError:
            raise _too_late(node, timeout_s, problem) from None


def _too_late(node: str, timeout_s: float, problem: str = "") -> FleetError:
    """The error if the node still has workers after `timeout_s`. `problem`: why the last try to send the command
    failed."""
    why = f"; {problem}" if problem else ""
    return FleetError(
        f"the workers of node {node} did not leave the node within {timeout_s:g} s (--timeout); if the drain has "
        f"begun, it continues{why}"
    )
