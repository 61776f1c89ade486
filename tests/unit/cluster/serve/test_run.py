"""The start of a deployment, and its end, with a fleet that never serves."""

import asyncio
import contextlib
import io
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton.config import BatonConfig
from baton.errors import ClusterError, ModelError
from baton.messages.control import ControlApi
from baton.system.curve import derive_keys
from baton.system.signals import StopSignals
from cluster.serve.run import _run_deployment
from cluster.serve.screen import Screen
from gateway import Tokenizer
from tests.factories.security import SECRET


class StartingFleet:
    """Its workers load for ever."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def start(self, *_: Any) -> ControlApi:
        self.events.append("started")
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("start over")
        raise AssertionError

    async def end(self, hurry: asyncio.Event) -> None:
        self.events.append("ended")


async def run(
    fleet: StartingFleet, loading: "Future[Tokenizer]", screen: Screen, signals: StopSignals
) -> None:
    config, keys = BatonConfig(), derive_keys(SECRET)
    await _run_deployment(config, keys, Path(), fleet, loading, screen, lambda _: asyncio.sleep(0), signals)


class UnwritableScreen(io.StringIO):
    """A screen on which nothing can be written, as if its disk were full or its reader had left."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("file", [io.StringIO(), UnwritableScreen()], ids=["screen", "no screen"])
async def test_a_start_that_is_interrupted_ends_the_fleet_whatever_the_screen_does(file: io.StringIO) -> None:
    fleet = StartingFleet()
    with StopSignals() as signals, contextlib.ExitStack() as stack:
        if isinstance(file, UnwritableScreen):
            stack.enter_context(pytest.raises(OSError, match="No space left"))
        asyncio.get_running_loop().call_later(0.05, signals.stop.set)
        async with asyncio.timeout(30.0):
            await run(fleet, Future(), Screen(Console(file=file, force_terminal=True)), signals)
    assert fleet.events[-1] == "ended"


async def test_a_refused_start_does_not_speak_of_requests() -> None:
    class RefusedFleet(StartingFleet):
        async def start(self, *_: Any) -> ControlApi:
            raise ClusterError("it is in use")

    fleet, said = RefusedFleet(), io.StringIO()
    with StopSignals() as signals, pytest.raises(ClusterError, match="it is in use"):
        await run(fleet, Future(), Screen(Console(file=said)), signals)
    assert fleet.events == ["ended"]
    assert "stopping" not in said.getvalue()


async def test_a_gateway_that_cannot_be_loaded_ends_the_start_without_waiting_for_workers() -> None:
    fleet, loading = StartingFleet(), Future[Tokenizer]()
    loading.set_exception(ModelError("no tokenizer.json"))
    screen = Screen(Console(file=io.StringIO()))
    with StopSignals() as signals, pytest.raises(ModelError, match=r"no tokenizer\.json"):
        async with asyncio.timeout(30.0):
            await run(fleet, loading, screen, signals)
    assert fleet.events == ["started", "start over", "ended"]
