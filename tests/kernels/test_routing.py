"""The experts that a router's logits choose, as torch chooses them.

Shape suffixes: T tokens, X experts, K experts of a token.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.kernels.routing import route_rows
from engine.layers.mixture import route
from engine.mixture_config import Mixture

QWEN = Mixture(num_experts=128, num_chosen=8, intermediate_size=768, is_normalized=True)
GPT_OSS = replace(QWEN, num_experts=32, num_chosen=4)
MIXTRAL = replace(QWEN, num_experts=8, num_chosen=2)
DEEPSEEK_V2 = replace(
    QWEN, num_experts=160, num_chosen=6, is_normalized=False, num_groups=8, num_chosen_groups=3, scale=16.0
)
DEEPSEEK_V3 = replace(
    QWEN,
    num_experts=256,
    is_sigmoid=True,
    has_choice_bias=True,
    num_groups=8,
    num_chosen_groups=4,
    num_compared=2,
    scale=2.5,
)
MIXTURES = {
    "Qwen3-30B-A3B": QWEN,
    "gpt-oss-20b": GPT_OSS,
    "Mixtral": MIXTRAL,
    "DeepSeek-V2": DEEPSEEK_V2,
    "DeepSeek-V3": DEEPSEEK_V3,
    "three of five": replace(QWEN, num_experts=5, num_chosen=3, is_normalized=False),
}


def empty_launch(mixture: Mixture, dtype: torch.dtype = torch.bfloat16, *, has_places: bool = False) -> None:
    meta = partial(torch.empty, device="meta")
    bias_X = meta(mixture.num_experts) if mixture.has_choice_bias else None
    places_X = meta(mixture.num_experts, dtype=torch.int32) if has_places else None
    route_rows(meta(3, mixture.num_experts, dtype=dtype), mixture, bias_X, places_X)


LAUNCHES = {
    "Qwen3-30B-A3B": partial(empty_launch, QWEN),
    "DeepSeek-V3": partial(empty_launch, DEEPSEEK_V3, torch.float32),
    "gpt-oss-20b": partial(empty_launch, GPT_OSS),
    "Mixtral-8x7B, experts of 2 ranks": partial(empty_launch, MIXTRAL, has_places=True),
    "DeepSeek-V2": partial(empty_launch, DEEPSEEK_V2, torch.float32),
}
RARE = ("gpt-oss-20b", "Mixtral-8x7B, experts of 2 ranks", "DeepSeek-V2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MIXTURES)
def test_is_what_torch_chooses(
    name: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """The logits of a row are far apart, since torch does not define the order of equal scores."""
    mixture = MIXTURES[name]
    num_experts = mixture.num_experts
    logits_TX = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(7)])
    logits_TX = (logits_TX * (4.0 / num_experts) - 2.0).to(dtype)
    bias_X = torch.randn(num_experts, generator=generator) / 8 if mixture.has_choice_bias else None
    expected_TK, expected_weights_TK = route(logits_TX, mixture, bias_X)
    within_TX = torch.full((7, num_experts + 3), math.nan, dtype=dtype)
    within_TX[:, :num_experts] = logits_TX
    experts_TK, weights_TK = route_rows(
        within_TX.to(device)[:, :num_experts], mixture, None if bias_X is None else bias_X.to(device)
    )
    assert (experts_TK.dtype, weights_TK.dtype) == (torch.int32, torch.float32)
    assert torch.equal(experts_TK.cpu(), expected_TK.to(torch.int32))
    torch.testing.assert_close(weights_TK.cpu(), expected_weights_TK)


def test_of_equal_scores_the_first_experts_are_chosen(device: torch.device) -> None:
    experts_TK, weights_TK = route_rows(torch.zeros(2, 8, device=device), MIXTRAL)
    assert experts_TK.tolist() == [[0, 1], [0, 1]]
    assert weights_TK.tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("mixture", [MIXTRAL, replace(MIXTRAL, is_sigmoid=True)], ids=["softmax", "sigmoid"])
def test_a_nan_chooses_experts_that_exist_and_no_expert_twice(mixture: Mixture, device: torch.device) -> None:
    """Other numbers would be read outside of the weights. Other rows do not change."""
    logits_TX = torch.tensor([[1.0, math.nan, 3, 2, 5, 4, 7, 6], [1, 0, 3, 2, 5, 4, 7, 6]], device=device)
    experts_TK, weights_TK = route_rows(logits_TX, mixture)
    assert len(set(experts_TK[0].tolist())) == 2
    assert set(experts_TK[0].tolist()) <= set(range(8))
    assert torch.isnan(weights_TK[0]).all()
    assert experts_TK[1].tolist() == [6, 7]
    assert torch.isfinite(weights_TK[1]).all()


def test_places_take_the_place_of_numbers(device: torch.device) -> None:
    """A rank has experts 2 and 3; all others get the number after its last one."""
    places_X = torch.tensor([2, 2, 0, 1, 2, 2, 2, 2], dtype=torch.int32, device=device)
    logits_TX = torch.tensor([[0.0, 1, 9, 2, 3, 4, 8, 5], [0, 1, 2, 9, 3, 4, 5, 6]], device=device)
    experts_TK, _ = route_rows(logits_TX, MIXTRAL, None, places_X)
    assert experts_TK.tolist() == [[0, 2], [1, 2]]
