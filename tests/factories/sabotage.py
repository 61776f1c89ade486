"""Changes the worker of this process from inside, which no signal could do.

Its steps never end, compute NaN, or take as long as a GPU's.
"""

import asyncio
import math
import os
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "BATON_TEST_SABOTAGE"
"""The environment variable that names the folder of orders. An order is a file named after the pid of its
process."""
_LOOK_EVERY_S = 0.2

_INSIDE = str(Path(__file__).parent / "inside")

STEP_S = 0.04
"""The step time of a device whose time does not depend on the number of rows. It is longer than the steps of
a tiny model."""


def hang() -> None:
    """From the next step on, the device computes without end. All other threads continue."""
    from engine.runner import ModelRunner

    def launch(_runner: ModelRunner, plan: object) -> NoReturn:
        threading.Event().wait()
        raise AssertionError(f"{plan} ended")

    ModelRunner.launch = launch  # type: ignore[method-assign, assignment]


def spoil() -> None:
    """Makes a weight of the first layer NaN, and with it all KV and all logits."""
    import torch

    from engine.models.decoder import Decoder

    original = Decoder.forward

    def forward(model: Decoder, *arguments: Any, **options: Any) -> torch.Tensor:
        first: Any = model._layers[0]
        first._input_norm_E = torch.full_like(first._input_norm_E, math.nan)
        return original(model, *arguments, **options)

    Decoder.forward = forward  # type: ignore[method-assign, assignment]


def pace() -> None:
    """From the next step on, a step ends at the earliest `STEP_S` after the previous step."""
    from baton.step import ModelRunnerOutput
    from engine.runner import LaunchedStep, ModelRunner

    launch, wait, ends = ModelRunner.launch, LaunchedStep._wait_for_output, dict[int, float]()
    last_end = 0.0

    def launch_on_device(runner: ModelRunner, plan: Any) -> LaunchedStep:
        nonlocal last_end
        step = launch(runner, plan)
        ends[id(step)] = last_end = max(time.monotonic(), last_end) + STEP_S
        return step

    def wait_for_device(step: LaunchedStep) -> ModelRunnerOutput:
        time.sleep(max(0.0, ends.pop(id(step), 0.0) - time.monotonic()))
        return wait(step)

    ModelRunner.launch = launch_on_device  # type: ignore[method-assign, assignment]
    LaunchedStep._wait_for_output = wait_for_device  # type: ignore[method-assign, assignment]


KINDS = {"hang": hang, "spoil": spoil, "pace": pace}


def obeying(folder: Path) -> dict[str, str]:
    """The environment of a fleet whose workers read their orders from this folder."""
    path = ":".join(filter(None, [_INSIDE, os.environ.get("PYTHONPATH", "")]))
    return {VARIABLE: str(folder), "PYTHONPATH": path}


def order(folder: Path, pid: int, kind: str) -> None:
    """Orders the process to change in this way; returns at once."""
    (folder / "next").write_text(kind)
    (folder / "next").rename(folder / str(pid))


async def carried_out(folder: Path, pid: int, kind: str) -> None:
    """Orders the change, and returns once the process has made it. The process must read this folder."""
    order(folder, pid, kind)
    while (folder / str(pid)).exists():
        await asyncio.sleep(_LOOK_EVERY_S / 4)


def obey(folder: Path) -> None:
    """Carries out the orders of this process without end.

    Runs in a thread of the process that is to break.
    """
    told = folder / str(os.getpid())
    while True:
        if told.exists():
            KINDS[told.read_text()]()
            told.unlink()
        time.sleep(_LOOK_EVERY_S)
