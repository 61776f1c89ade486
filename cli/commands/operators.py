"""The commands of operators that change a fleet through its gateway: drain a worker, change its role, restart
workers, flush prefix caches. Each shows its progress.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from baton.fleet import CacheFlush, RolloutStep
from baton.messages.control import MAY_BE_CARRIED_OUT
from baton.system.tasks import end_tasks
from baton.worker import WorkerRole
from cli.console import CommandConsole
from cli.target import Target
from cli.views import words
from cluster.serve.screen import Screen, ScreenStage
from gateway.client import CallBroken, GatewayClient, GatewayError

STATUS_INTERVAL_S = 1.0
"""Pause between two requests for the state of the workers."""


def run(target: Target, options: argparse.Namespace) -> int:
    """Runs the command of this name; returns its exit code."""
    return _OPERATORS_COMMANDS[options.command](target, options)


def drain(target: Target, options: argparse.Namespace) -> int:
    """Removes a worker for good; its requests end or move to other workers. Returns once it is removed.

    Raises GatewayError with the reason if the worker is not removed.
    """
    worker = options.worker
    with running_command("drain", f"draining {worker}", options.json) as stage:
        total_s = asyncio.run(
            carry_out(target, lambda client: client.drain(worker), of_worker(worker), stage.say)
        )
        stage(f"{worker} is removed")
    if options.json:
        print(json.dumps({"worker": worker, "total_s": total_s}))
    return 0


def set_role(target: Target, options: argparse.Namespace) -> int:
    """Changes the role of a running worker; weights and prefix cache stay. Returns when it serves in its new role.

    Raises GatewayError if the worker keeps its old role.
    """
    worker, role = options.worker, WorkerRole(options.role)
    with running_command("role", f"{worker} becomes a {role.value} worker", options.json) as stage:
        total_s = asyncio.run(
            carry_out(target, lambda client: client.set_role(worker, role), of_worker(worker), stage.say)
        )
        stage(f"{worker} serves as a {role.value} worker")
    if options.json:
        print(json.dumps({"worker": worker, "role": role.value, "total_s": total_s}))
    return 0


def rollout(target: Target, options: argparse.Namespace) -> int:
    """Restarts these workers (by default all), one after the other, while the others serve.

    Raises GatewayError if the rollout stopped.
    """
    steps: list[RolloutStep] = []

    async def all_steps(client: GatewayClient) -> None:
        async for step in client.rollout(options.workers):
            steps.append(step)
            stage.note(f"{step.worker} serves again, {step.done} of {step.count}")

    with running_command("rollout", "restarting one worker after the other", options.json) as stage:
        try:
            total_s = asyncio.run(carry_out(target, all_steps, of_absent, stage.say))
        except GatewayError as error:
            raise error if not steps else _with_progress(error, steps) from None
        stage(f"{len(steps)} worker{'' if len(steps) == 1 else 's'} restarted")
    if options.json:
        renewed = [{"worker": step.worker, "incarnation": step.incarnation} for step in steps]
        print(json.dumps({"workers": renewed, "total_s": total_s}))
    return 0


def flush_cache(target: Target, options: argparse.Namespace) -> int:
    """Empties the prefix caches of workers. Later prompts are computed in full.

    Returns 1 if any worker keeps its cache; stderr says which worker, and why.
    """
    started = time.monotonic()
    with running_command("flush-cache", "emptying prefix caches", options.json) as stage:
        flushes = asyncio.run(_flush(target, options.worker, options.force))
        flushed = [flush.worker for flush in flushes if flush.is_flushed]
        stage(f"{len(flushed)} of {len(flushes)} workers have emptied their prefix caches")
    if options.json:
        outcomes = [
            {"worker": flush.worker, "is_flushed": flush.is_flushed, "obstacle": flush.obstacle}
            for flush in flushes
        ]
        print(json.dumps({"workers": outcomes, "total_s": time.monotonic() - started}))
    kept = [flush for flush in flushes if not flush.is_flushed]
    for flush in kept:
        print(f"baton flush-cache: {flush.worker} keeps its prefix cache: {flush.obstacle}", file=sys.stderr)
    return 1 if kept else 0


@contextmanager
def running_command(command: str, doing: str, as_json: bool) -> Iterator[ScreenStage]:
    """Shows the command while it runs, and then its outcome; on stderr if stdout is reserved for JSON.

    Ctrl-C ends the wait, not the command.
    """
    screen = Screen(CommandConsole(stderr=as_json))
    try:
        with screen.stage(command, doing) as stage:
            yield stage
    except KeyboardInterrupt:
        notice = (
            f"baton {command}: stopped waiting; the fleet still carries out the command; see `baton status`"
        )
        print(notice, file=sys.stderr)
        raise
    except CallBroken as error:
        raise CallBroken(error.code, f"{error.message}; {MAY_BE_CARRIED_OUT}", error.details) from None


def _with_progress(error: GatewayError, steps: list[RolloutStep]) -> GatewayError:
    done = ", ".join(step.worker for step in steps)
    message = f"{error.message}; restarted before the failure: {len(steps)} of {steps[-1].count}: {done}"
    return type(error)(error.code, message, error.details)


async def _flush(target: Target, workers: Sequence[str], force: bool) -> tuple[CacheFlush, ...]:
    async with target.client() as client:
        return await client.flush_cache(workers, force=force)


async def carry_out(
    target: Target,
    call: Callable[[GatewayClient], Awaitable[None]],
    describe: Callable[[list[dict[str, Any]]], str],
    say: Callable[[str], None],
) -> float:
    """Makes a call to this gateway. Until the call ends, shows the workers through `describe`.

    Returns the duration in seconds.
    """
    async with target.client() as client:
        started = time.monotonic()
        showing = asyncio.create_task(_show_workers(client, describe, say))
        try:
            await call(client)
        finally:
            await end_tasks(showing)
        return time.monotonic() - started


async def _show_workers(
    client: GatewayClient, describe: Callable[[list[dict[str, Any]]], str], say: Callable[[str], None]
) -> None:
    while True:
        await asyncio.sleep(STATUS_INTERVAL_S)
        try:
            say(describe((await client.describe())["workers"]))
        except GatewayError:
            continue  # the call itself raises the error


def of_worker(name: str) -> Callable[[list[dict[str, Any]]], str]:
    """A function that describes the worker of this name."""
    return lambda workers: "; ".join(map(load_text, (w for w in workers if w["name"] == name))) or "gone"


def of_absent(workers: list[dict[str, Any]]) -> str:
    """Describes the workers that do not serve."""
    absent = [worker for worker in workers if worker["state"] != "ready"]
    return "; ".join(f"{worker['name']} {load_text(worker)}" for worker in absent) or "all serve"


def load_text(worker: dict[str, Any]) -> str:
    """The worker's state, and what it still has: requests, and blocks that other workers may still read or write."""
    state, requests, blocks = words.state_text(worker).plain, worker["requests"], worker["kv_blocks"]
    if not blocks["total"]:
        return state
    kinds = (f", {blocks[kind]} blocks {kind}" for kind in ("leased", "quarantined") if blocks[kind])
    return f"{state}, {sum(requests.values())} requests{''.join(kinds)}"


_OPERATORS_COMMANDS: dict[str, Callable[[Target, argparse.Namespace], int]] = {
    "drain": drain,
    "role": set_role,
    "rollout": rollout,
    "flush-cache": flush_cache,
}
