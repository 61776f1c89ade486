"""`baton top`: the state of the fleet, redrawn every second on its own screen, until q or Ctrl-C."""

import argparse
import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live

from baton.errors import ConfigError
from baton.system.signals import StopSignals, unless
from cli.console import CommandConsole
from cli.target import Target
from cli.views.top import TopView
from gateway.client import GatewayClient, GatewayError

ANSWER_TIMEOUT_S = 5.0
"""A gateway that takes longer than this counts as silent. The next update tries again."""


def run(target: Target, options: argparse.Namespace) -> int:
    """Shows the fleet until the user presses q or a signal arrives, then restores the terminal.

    Raises GatewayError if no gateway answers at the start, and ConfigError if there is no terminal.
    """
    console = CommandConsole()
    if not console.is_terminal or console.is_dumb_terminal:
        why = "this terminal cannot be redrawn (TERM)" if console.is_terminal else "stdout is not a terminal"
        raise ConfigError(
            f"{why}; use `baton status` to see the state once, or `baton status --json` in programs"
        )
    with StopSignals() as signals:
        signals.run(_show(target, options.interval, console, signals.stop))
    return 0


async def _show(target: Target, interval_s: float, console: Console, stop: asyncio.Event) -> None:
    async with target.client() as client:
        await unless(stop, _follow(client, target, interval_s, console, stop.set))


async def _follow(
    client: GatewayClient, target: Target, interval_s: float, console: Console, leave: Callable[[], None]
) -> None:
    loop = asyncio.get_running_loop()
    seen_at, current = loop.time(), await _describe(client)
    view = TopView(target.address, None, current, 0.0, console.height)
    live = Live(view, console=console, screen=True, auto_refresh=False)
    with _keys(leave), live:
        while True:
            live.update(view, refresh=True)
            await asyncio.sleep(interval_s)
            try:
                latest = await _describe(client)
            except GatewayError as error:
                view = TopView(target.address, None, current, 0.0, console.height, str(error))
                continue
            now = loop.time()
            view = TopView(target.address, current, latest, now - seen_at, console.height)
            seen_at, current = now, latest


async def _describe(client: GatewayClient) -> dict[str, Any]:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await client.describe()
    except TimeoutError:
        raise GatewayError(
            "DEADLINE_EXCEEDED", f"the gateway has not answered for {ANSWER_TIMEOUT_S:g} s"
        ) from None


@contextmanager
def _keys(leave: Callable[[], None]) -> Iterator[None]:
    """Reads keys at once, without echo. Ctrl-Z is disabled, since it would not restore the screen."""
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    loop = asyncio.get_running_loop()

    def on_input() -> None:
        pressed = os.read(terminal, 64)
        if not pressed:  # the terminal is closed
            loop.remove_reader(terminal)
        if not pressed or b"q" in pressed.lower():
            leave()

    former = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    mode = termios.tcgetattr(terminal)
    mode[6][termios.VSUSP] = b"\0"
    termios.tcsetattr(terminal, termios.TCSADRAIN, mode)
    loop.add_reader(terminal, on_input)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, former)
