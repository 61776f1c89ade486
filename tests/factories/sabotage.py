"""Breaks the worker of this process from inside, as no signal can: its steps never end, or compute NaN."""

import math
import os
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "BATON_TEST_SABOTAGE"
"""Of the environment: the folder in which processes look for what to do, in a file named after their pid."""
_LOOK_EVERY_S = 0.2


def hang() -> None:
    """From the next step on, the device computes for ever; all other threads go on."""
    from engine.runner import ModelRunner

    def launch(_runner: ModelRunner, plan: object) -> NoReturn:
        threading.Event().wait()
        raise AssertionError(f"{plan} ended")

    ModelRunner.launch = launch  # type: ignore[method-assign, assignment]


def spoil() -> None:
    """A weight of the first layer becomes NaN, and with it all KV and all logits."""
    import torch

    from engine.models.llama import LlamaForCausalLM

    original = LlamaForCausalLM.forward

    def forward(model: LlamaForCausalLM, tokens: Any, attention: Any) -> torch.Tensor:
        first = model._layers[0]
        first._input_norm_E = torch.full_like(first._input_norm_E, math.nan)
        return original(model, tokens, attention)

    LlamaForCausalLM.forward = forward  # type: ignore[method-assign, assignment]


KINDS = {"hang": hang, "spoil": spoil}


def order(folder: Path, pid: int, kind: str) -> None:
    """The process breaks soon, in this way."""
    (folder / "next").write_text(kind)
    (folder / "next").rename(folder / str(pid))


def obey(folder: Path) -> None:
    """Does what it is told, for ever. The thread of a process that may be broken."""
    told = folder / str(os.getpid())
    while True:
        if told.exists():
            kind = told.read_text()
            told.unlink()
            KINDS[kind]()
        time.sleep(_LOOK_EVERY_S)
