"""Cases of the matrix product with few rows for a sweep. torch's library is one of the candidates.

Shape suffixes: T tokens, I input features, O output features.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.sweep_case import Candidate, Launch, SweepCase, copies_beyond_cache, neighbours
from engine.kernels.skinny_linear import choose_launch, skinny_linear
from engine.kernels.skinny_linear_dot import DotLaunch
from engine.kernels.skinny_linear_fma import FmaLaunch

PRODUCTS = {
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate and up": (4096, 28672),
    "down": (14336, 4096),
    "lm head": (4096, 128256),
}
"""Inputs and outputs of the layers of Llama-3.1-8B."""
TOKENS = (1, 2, 4, 16)
LIBRARY = "torch's"
ALTERNATIVES: dict[str, tuple[int, ...]] = {
    "rows": (1, 2, 4, 8),
    "max_programs": (132, 264, 396, 528, 1056, 2112, 4224, 2**20),
    "block_outputs": (16, 32, 64, 128),
    "block_inputs": (64, 128, 256),
    "num_stages": (2, 3, 4, 5),
    "num_warps": (4, 8),
}


def cases(setting: Setting) -> Iterator[SweepCase]:
    itemsize = 4 if setting.is_dry else 2
    for name, (num_inputs, num_outputs) in ({"tiny": (32, 16)} if setting.is_dry else PRODUCTS).items():
        num_bytes = num_inputs * num_outputs * itemsize
        copies = 2 if setting.is_dry else copies_beyond_cache(num_bytes)
        for num_tokens in (2,) if setting.is_dry else TOKENS:
            shape = (num_tokens, num_inputs, num_outputs)
            yield SweepCase(
                f"linear: {name}, {num_tokens} rows",
                copies,
                num_bytes,
                2e-2,
                partial(_candidates, setting, shape, copies),
                LIBRARY,
            )


def _candidates(setting: Setting, shape: tuple[int, int, int], num_copies: int) -> dict[str, Candidate]:
    num_tokens, num_inputs, num_outputs = shape
    device, dtype = setting.device, torch.float32 if setting.is_dry else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    x_TI = torch.randn(num_tokens, num_inputs, dtype=dtype, device=device, generator=generator)
    weight_OI = torch.randn(num_outputs, num_inputs, dtype=dtype, device=device, generator=generator)
    weights = [weight_OI, *(weight_OI.clone() for _ in range(num_copies - 1))]

    def ours(launch: FmaLaunch | DotLaunch, copy: int) -> Launch:
        return lambda: skinny_linear(x_TI, weights[copy], launch=launch)

    def torchs(copy: int) -> Launch:
        return lambda: F.linear(x_TI, weights[copy])

    chosen = choose_launch(num_tokens, num_inputs, num_outputs, dtype.itemsize)
    alternatives: dict[str, tuple[int, ...]] = {"num_warps": (8,)} if setting.is_dry else ALTERNATIVES
    candidates: dict[str, Candidate] = {
        name: partial(ours, launch) for name, launch in neighbours(chosen, alternatives)
    }
    return {**candidates, LIBRARY: torchs}
