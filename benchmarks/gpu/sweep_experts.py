"""Cases of a mixture's products for a sweep: the experts of Qwen3-30B-A3B, chosen at random.

Shape suffixes: T tokens, K experts of a token, X experts, I input features, O output features.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.shapes import expected_experts
from benchmarks.gpu.sweep_case import Candidate, Launch, SweepCase, copies_beyond_cache, neighbours
from engine.activation import Gate
from engine.kernels.expert_linear import ExpertLaunch, ExpertMatrices, choose_expert_launch, expert_linear
from engine.kernels.sort_pairs import MAX_UNSORTED_TOKENS, ExpertPairs

TOKENS = (1, 4, 16, 64, 256, 1024, 2048, 8192)
ALTERNATIVES: dict[str, tuple[int, ...]] = {
    "block_pairs": (16, 32, 64, 128),
    "block_outputs": (32, 64, 128, 256),
    "block_inputs": (64, 128, 256),
    "num_stages": (2, 3, 4, 5, 6),
    "num_warps": (4, 8),
}
LARGE_TILES = (
    ExpertLaunch(64, 128, 64, num_warps=4, num_stages=3),
    ExpertLaunch(64, 256, 64, num_warps=8, num_stages=3),
    ExpertLaunch(128, 128, 64, num_warps=8, num_stages=3),
    ExpertLaunch(128, 256, 64, num_warps=8, num_stages=3),
    ExpertLaunch(256, 128, 64, num_warps=8, num_stages=3),
    ExpertLaunch(128, 128, 32, num_warps=8, num_stages=5),
)
"""Launches for many tokens that differ from the chosen one in several numbers."""


@dataclass(frozen=True, slots=True)
class _Product:
    num_inputs: int
    num_outputs: int
    """Outputs of each expert's matrix. In the first product, half of them are gates."""
    is_first: bool


@dataclass(frozen=True, slots=True)
class _Sizes:
    num_experts: int
    num_chosen: int
    products: dict[str, _Product]
    tokens: tuple[int, ...]


QWEN = _Sizes(128, 8, {"gate and up": _Product(2048, 1536, True), "down": _Product(768, 2048, False)}, TOKENS)
TINY = _Sizes(4, 2, {"tiny": _Product(32, 64, True)}, (2, 17))


def cases(setting: Setting) -> Iterator[SweepCase]:
    sizes, itemsize = (TINY, 4) if setting.is_dry else (QWEN, 2)
    for name, product in sizes.products.items():
        for num_tokens in sizes.tokens:
            num_read = expected_experts(sizes.num_experts, sizes.num_chosen, num_tokens)
            num_bytes = int(num_read * product.num_inputs * product.num_outputs * itemsize)
            copies = 2 if setting.is_dry else min(8, copies_beyond_cache(num_bytes))
            make = partial(_candidates, setting, sizes, product, num_tokens, copies)
            yield SweepCase(f"experts: {name}, {num_tokens} rows", copies, num_bytes, 2e-2, make)


def _candidates(
    setting: Setting, sizes: _Sizes, product: _Product, num_tokens: int, num_copies: int
) -> dict[str, Candidate]:
    device, dtype = setting.device, torch.float32 if setting.is_dry else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    randn = partial(torch.randn, dtype=dtype, device=device, generator=generator)
    scores_TX = torch.rand(num_tokens, sizes.num_experts, device=device, generator=generator)
    experts_TK = scores_TX.topk(sizes.num_chosen).indices.to(torch.int32)
    pairs = ExpertPairs.of(experts_TK, sizes.num_experts, sizes.num_experts)
    num_pairs = num_tokens * sizes.num_chosen
    x = randn(num_tokens if product.is_first else num_pairs, product.num_inputs)
    factors_N = None if product.is_first else torch.rand(num_pairs, device=device, generator=generator)
    weight_XOI = randn(sizes.num_experts, product.num_outputs, product.num_inputs)
    weights = [weight_XOI, *(weight_XOI.clone() for _ in range(num_copies - 1))]
    activation = Gate.SILU if product.is_first else None

    def launched(launch: ExpertLaunch, copy: int) -> Launch:
        matrices = ExpertMatrices(weights[copy])
        return lambda: expert_linear(
            x, matrices, pairs, factors_N=factors_N, activation=activation, launch=launch
        )

    chosen = choose_expert_launch(
        num_tokens, num_pairs, sizes.num_experts, dtype, is_wide=not product.is_first
    )
    alternatives: dict[str, tuple[int, ...]] = {"num_warps": (8,)} if setting.is_dry else ALTERNATIVES
    launches = dict(neighbours(chosen, alternatives))
    if num_tokens > MAX_UNSORTED_TOKENS and not setting.is_dry:
        launches |= {_name(launch): launch for launch in LARGE_TILES if launch not in launches.values()}
    return {name: partial(launched, launch) for name, launch in launches.items()}


def _name(launch: ExpertLaunch) -> str:
    tile = f"{launch.block_pairs} x {launch.block_outputs} x {launch.block_inputs}"
    return f"{tile}, {launch.num_warps} warps, {launch.num_stages} stages"
