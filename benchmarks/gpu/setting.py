"""Where a part runs, and whether its figures mean anything. The driver makes a Setting for each part."""

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
"""What a part calls with each row as soon as the row exists. So a time limit loses only the remaining
rows."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A GPU, or a CPU in place of a GPU.

    On a CPU, shapes are tiny, Triton's interpreter runs the kernels, and figures have no meaning.
    """

    is_dry: bool
    folder: Path
    """Folder for generated models and temporary files."""
    out: Path | None
    """Folder for files that are kept, such as traces. None: no such files are written."""
    ends_at: float = math.inf
    """When the part is ended, in time of time.monotonic()."""
    shapes: Literal["few", "many"] = "few"
    """Which shapes the kernels' tests use."""
    cases: str = ""
    """A sweep runs only the cases whose names contain this text."""
    models: tuple[str, ...] = ()
    """Names from shapes.LARGE; empty: all of them."""

    quantization: Literal["auto", "fp8"] = "auto"
    """How the parts decode and prefill keep the layers' weights; `auto`: as the model has them."""

    def titled(self, model: str) -> str:
        """The model's name in rows."""
        return model if self.quantization == "auto" else f"{model}, {self.quantization}"

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.ends_at - time.monotonic())

    def chosen(self, models: dict[str, Any]) -> dict[str, Any]:
        """Those of `models` that the command selects, in the order of `models`."""
        return {name: config for name, config in models.items() if not self.models or name in self.models}

    def folder_for_files(self) -> Path:
        """The folder for logs and traces: `out`, or else a temporary folder of the check."""
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
    """Emits the rows of `work`. An exception becomes a failed row, and the part continues."""
    try:
        for row in work():
            emit(row)
    except Exception as error:  # one case that fails or does not fit must not hide the others
        traceback.print_exc()
        emit(Row(part, name, "failed", f"{type(error).__name__}: {error}"[:300], is_failed=True))


def describe(is_dry: bool) -> Figures:
    """Device and versions. A date is left out, so that equal results make equal files."""
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
        "ptxas": triton.knobs.nvidia.ptxas.version,  # of TRITON_PTXAS_PATH, if set
        "ptxas_of_cuda": _ptxas_of_cuda(),
    }


def _ptxas_of_cuda() -> str | None:
    """The version of the CUDA toolkit's assembler; None without a toolkit. Triton uses it only on request."""
    path = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"
    if not os.access(path, os.X_OK):
        return None
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found[1] if found else text.strip()
