"""A smoke test's case: a launch that can be repeated, and torch's result for the same inputs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from benchmarks.gpu.setting import Setting

Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class SmokeCase:
    """One launch, or a few launches that belong together."""

    name: str
    files: tuple[str, ...]
    """Files of engine/kernels that contain the case's kernels and the functions that these call."""
    launch: Callable[[], Outputs]
    """Launches on the same inputs each time. Returns new tensors, or copies."""
    reference: Callable[[], Outputs]
    max_error: float
    """Largest allowed error of each output, relative to the reference's norm. 0: every element must be equal."""


Maker = Callable[[], Iterable[SmokeCase]]
"""Makes the inputs on the device. One process compiles the cases of one maker."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of Llama-3.1-8B on a device. On a CPU, the shapes are so small that the interpreter is quick."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    tokens: int
    hidden: int
    intermediate: int
    heads: tuple[int, int, int]
    """Numbers of query heads and KV heads, and the head size."""
    block_size: int
    vocab: int
    max_error: float
    """Largest allowed error of products, sums and functions whose results are rounded to `dtype`."""
    max_error_fp8: float

    @classmethod
    def of(cls, setting: Setting) -> "Shapes":
        if setting.is_dry:
            # The interpreter rounds float8 in its own way (tests/kernels/float8.py).
            return cls(setting.device, torch.float32, torch.float32, 2, 32, 32, (2, 1, 16), 32, 60, 1e-5, 0.2)
        bf16 = torch.bfloat16
        return cls(setting.device, bf16, bf16, 7, 4096, 14336, (32, 8, 128), 64, 128_256, 1e-2, 0.05)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random numbers. The same shape always gets the same numbers."""
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randn(*shape, generator=generator, device=self.device).to(dtype or self.dtype)

    def int32(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
