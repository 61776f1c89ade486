"""Where a part runs and whether its figures mean anything; made once by the driver, handed to every part."""

import math
import os
import platform
import re
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu.report import Figures, Row

Emit = Callable[[Row], None]
"""What a part does with a row as soon as it has one: a time limit then loses only the rest."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A GPU, or a CPU that stands in for one: tiny shapes, kernels in Triton's interpreter, figures without meaning."""

    is_dry: bool
    folder: Path
    """For models that are made up and files that are written along the way."""
    out: Path | None
    """For files that are to stay, such as traces; None: none are."""
    ends_at: float = math.inf
    """By time.monotonic(): when the part is ended, wherever it is."""
    shapes: Literal["few", "many"] = "few"
    """Of the kernels' tests."""
    cases: str = ""
    """A sweep takes those with this in their names."""
    models: tuple[str, ...] = ()
    """Of shapes.LARGE; empty: all of them."""

    @property
    def left_s(self) -> float:
        return max(0.0, self.ends_at - time.monotonic())

    def chosen(self, models: dict[str, Any]) -> dict[str, Any]:
        """Of these, in their order."""
        return {name: config for name, config in models.items() if not self.models or name in self.models}

    def folder_for_files(self) -> Path:
        """Where a part writes logs and traces: `out`, or else a folder that goes with the check."""
        folder = self.out or self.folder
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.is_dry else torch.device("cuda", 0)

    @property
    def num_multiprocessors(self) -> int:
        if self.is_dry:
            return 2
        return torch.cuda.get_device_properties(self.device).multi_processor_count


def guarded(emit: Emit, part: str, name: str, work: Callable[[], Iterable[Row]]) -> None:
    """Emits what `work` gives; what it raises becomes a row that failed, and the part goes on."""
    try:
        for row in work():
            emit(row)
    except Exception as error:  # one case that is broken, or does not fit, must not hide the others
        traceback.print_exc()
        emit(Row(part, name, "failed", f"{type(error).__name__}: {error}"[:300], is_failed=True))


def describe(is_dry: bool) -> Figures:
    """Device and versions; no date, so that equal results are equal files."""
    import transformers
    import triton

    properties = None if is_dry else torch.cuda.get_device_properties(0)
    return {
        "device": "none" if properties is None else properties.name,
        "multiprocessors": 0 if properties is None else properties.multi_processor_count,
        "memory_gib": 0.0 if properties is None else round(properties.total_memory / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "ptxas": triton.knobs.nvidia.ptxas.version,  # TRITON_PTXAS_PATH's, if set
        "ptxas_of_cuda": _ptxas_of_cuda(),
    }


def _ptxas_of_cuda() -> str | None:
    """The version of the toolkit's assembler, which Triton uses only if it is told to; None where there is none."""
    path = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"
    if not os.access(path, os.X_OK):
        return None
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found[1] if found else text.strip()
