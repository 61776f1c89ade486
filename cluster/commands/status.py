"""`baton status`: what a gateway knows of its fleet, as a table or as JSON."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from gateway.client import GatewayClient

_WIDTH_OF_FILES = 160
"""Columns when nobody's terminal says how wide the table may be."""


def run(target: str, as_json: bool) -> int:
    """Prints how everything stands. GatewayError if nobody answers at `target`."""
    description = asyncio.run(_describe(target))
    if as_json:
        print(json.dumps(description))
    else:
        console = Console()
        show(description, console if console.is_terminal else Console(width=_WIDTH_OF_FILES))
    return 0


def show(description: dict[str, Any], console: Console) -> None:
    """A line about the gateway, and a row for each worker."""
    gateway = description["gateway"]
    console.print(f"{description['model']}  [dim]{description['model_path']}[/]", soft_wrap=True)
    console.print(f"{gateway['in_flight']} requests in flight, {gateway['queued']} queued")
    table = Table("worker", "role", "state", "node", "pid", box=None, header_style="bold", pad_edge=False)
    for heading in ("free blocks", "leased", "quarantined", "running", "waiting", "loading"):
        table.add_column(heading, justify="right", no_wrap=True)
    for worker in description["workers"]:
        blocks, requests = worker["kv_blocks"], worker["requests"]
        row = (
            *(worker[key] for key in ("name", "role", "state", "node", "pid")),
            f"{blocks['free']}/{blocks['total']}",
            blocks["leased"],
            blocks["quarantined"],
            *(requests[key] for key in ("running", "waiting", "waiting_for_remote_kvs")),
        )
        table.add_row(*map(str, row))
    console.print(table)
    hand_overs = [(worker["name"], peer) for worker in description["workers"] for peer in worker["kv_peers"]]
    if hand_overs:
        console.print(_hand_overs_table(hand_overs))


def _hand_overs_table(hand_overs: Iterable[tuple[str, dict[str, Any]]]) -> Table:
    """What every worker gave to and took from every other one; times are means of those that were done, in ms."""
    table = Table("worker", "", "peer", "transport", box=None, header_style="bold", pad_edge=False)
    for heading in ("handed over", "failed", "not needed", "MiB", "queued", "moving", "exposed ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for worker, peer in hand_overs:
        is_producer, num_done = peer["role"] == "producer", int(peer["done"])
        means = {
            key: f"{1000 * peer[key] / num_done:.1f}" if num_done else "-"
            for key in ("queued_s", "moving_s", "exposed_s")
        }
        table.add_row(
            worker,
            "to" if is_producer else "from",
            peer["peer"],
            peer["transport"] or "-",
            str(num_done),
            str(peer["failed"]),
            str(peer["not_needed"]),
            f"{int(peer['bytes']) / 2**20:.1f}",
            "" if is_producer else means["queued_s"],
            "" if is_producer else means["moving_s"],
            means["exposed_s"] if is_producer else "",
        )
    return table


async def _describe(target: str) -> dict[str, Any]:
    async with GatewayClient(target) as client:
        return await client.describe()
