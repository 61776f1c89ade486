"""`baton status`: prints a fleet, as its gateway and controller see it, as tables or as JSON."""

import argparse
import asyncio
import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.console import wide_console
from cli.target import Target
from cli.views import words


def run(target: Target, options: argparse.Namespace) -> int:
    """Prints the state of the fleet. Raises GatewayError if no gateway answers at `target`."""
    description = asyncio.run(_describe(target))
    if options.json:
        print(json.dumps(description))
    else:
        show(description, wide_console())
    return 0


def show(description: dict[str, Any], console: Console) -> None:
    """Prints lines about requests and the controller, a row per node and worker, and the last failures."""
    gateway, workers = description["gateway"], description["workers"]
    console.print(
        Text.assemble(
            description["model"],
            f" in {words.dtypes_text(description)}{words.weights_text(workers)}  ",
            (description["model_path"], "dim"),
        ),
        soft_wrap=True,
    )
    in_flight = f"{gateway['in_flight']} requests in flight, {gateway['queued']} queued; finished: "
    console.print(in_flight + words.paths_text(gateway["paths"]), soft_wrap=True, highlight=False)
    console.print(words.outcomes_text(gateway["counters"]), soft_wrap=True, highlight=False)
    console.print(words.controller_text(description["controller"]), soft_wrap=True)
    is_wide = console.width >= words.WIDE
    if description["nodes"]:
        console.print("", _nodes_table(description["nodes"]))
    console.print("", _workers_table(workers, is_wide))
    failures = [
        Text.assemble((f"{worker}: ", "yellow"), what) for worker, what in words.failures(description)
    ]
    if failures:
        console.print(Text("\nlast failures", "bold"))
        console.print(*failures, sep="\n", overflow="ellipsis", no_wrap=True)
    hand_overs = [(worker["name"], peer) for worker in workers for peer in worker["kv_peers"]]
    if hand_overs:
        console.print("", _hand_overs_table(hand_overs, is_wide))


def _nodes_table(nodes: Iterable[dict[str, Any]]) -> Table:
    table = words.plain_table("node", "address", "state", "resources", "workers")
    for node in nodes:
        state = Text("alive", "green") if node["is_alive"] else Text("gone", "bold red")
        kind = Text(
            (", head" if node["is_head"] else "") + (", draining" if node["is_draining"] else ""), "dim"
        )
        resources = ", ".join(f"{amount:g} {name}" for name, amount in node["resources"].items()) or "-"
        workers = ", ".join(node["workers"]) or "-"
        table.add_row(Text(node["name"]), Text(node["address"]), state + kind, Text(resources), Text(workers))
    return table


def _workers_table(workers: Iterable[dict[str, Any]], is_wide: bool) -> Table:
    """One row for each worker. A missing worker has only a state and its number of starts."""
    headings = ("free blocks", "leased", "quarantined", "running", "waiting", "loading", "starts")
    if not is_wide:
        headings = ("free", "lease", "quar", "run", "wait", "load", "starts")
    table = words.plain_table("worker", "role", "state", "node", *(["pid", "threads"] if is_wide else []))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for worker in workers:
        table.add_row(
            Text(worker["name"]),
            Text(words.role_text(worker, is_wide)),
            words.state_text(worker),
            Text(words.node_of(worker)),
            *([str(worker["pid"] or "-"), words.threads_text(worker)] if is_wide else []),
            *_numbers(worker),
            words.starts_of(worker),
        )
    return table


def _numbers(worker: dict[str, Any]) -> list[str]:
    blocks, requests = worker["kv_blocks"], worker["requests"]
    if not blocks["total"]:
        return [""] * 6
    numbers = (
        blocks["leased"],
        blocks["quarantined"],
        requests["running"],
        requests["waiting"],
        requests["waiting_for_remote_kvs"],
    )
    return [f"{blocks['free']}/{blocks['total']}", *map(str, numbers)]


def _hand_overs_table(hand_overs: Iterable[tuple[str, dict[str, Any]]], is_wide: bool) -> Table:
    """One row for each pair of workers. Times are means over finished hand-overs, in milliseconds."""
    table = words.plain_table("worker", "", "peer", "transport")
    for heading in ("handed over" if is_wide else "done", "failed", *(["not needed"] if is_wide else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("MiB", "queued", "moving", "exposed ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for worker, peer in hand_overs:
        is_producer = peer["role"] == "producer"
        table.add_row(
            Text(worker),
            "to" if is_producer else "from",
            Text(peer["peer"]),
            peer["transport"] or "-",
            str(peer["done"]),
            str(peer["failed"]),
            *([str(peer["not_needed"])] if is_wide else []),
            f"{int(peer['bytes']) / 2**20:.1f}",
            "" if is_producer else _mean_ms(peer, "queued_s"),
            "" if is_producer else _mean_ms(peer, "moving_s"),
            _mean_ms(peer, "exposed_s") if is_producer else "",
        )
    return table


def _mean_ms(peer: dict[str, Any], key: str) -> str:
    num_done = int(peer["done"])
    return f"{1000 * peer[key] / num_done:.1f}" if num_done else "-"


async def _describe(target: Target) -> dict[str, Any]:
    async with target.client() as client:
        return await client.describe()
