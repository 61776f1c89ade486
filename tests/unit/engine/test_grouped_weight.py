"""4- and 8-bit weights: rounding, slices, and joined outputs."""

from typing import Literal

import pytest
import torch

from engine.layers.grouped_weight import GroupedWeight

BITS: tuple[Literal[4, 8], ...] = (4, 8)


def weight(num_outputs: int = 24, num_inputs: int = 96) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(num_outputs, num_inputs) * torch.logspace(-3, 1, num_outputs).unsqueeze(1)


@pytest.mark.parametrize("group_size", [16, 32])
def test_8_bits_keep_values_to_half_a_step(group_size: int) -> None:
    exact = weight()
    found = GroupedWeight.quantize(exact, 8, group_size)
    groups = exact.unflatten(-1, (-1, group_size))
    half_a_step = groups.abs().amax(-1, keepdim=True) / 127 * 0.5001
    assert ((found.dequantized().view_as(groups) - groups).abs() <= half_a_step).all()
    assert torch.equal(found.mins_OG, found.scales_OG * -128)


@pytest.mark.parametrize("group_size", [16, 32])
def test_4_bits_are_nearer_than_plain_rounding(group_size: int) -> None:
    exact = weight(256, 512)
    groups = exact.unflatten(-1, (-1, group_size))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    plain = ((groups - low) / (high - low) * 15).round() / 15 * (high - low) + low
    plain_errors = (plain - groups).square().sum(-1)
    found = GroupedWeight.quantize(exact, 4, group_size)
    errors = (found.dequantized().view_as(groups) - groups).square().sum(-1)
    assert (errors <= plain_errors * 1.0001).all()
    relative = errors / plain_errors
    assert relative.mean() < 0.9
    assert found.values_OI.max() == 15


@pytest.mark.parametrize("bits", BITS)
def test_equal_weights_and_zeros_are_kept(bits: Literal[4, 8]) -> None:
    exact = torch.tensor([0.0, 0.25, -3.0]).unsqueeze(1).expand(3, 64)
    found = GroupedWeight.quantize(exact, bits).dequantized()
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)
    assert (found[0] == 0).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights_are_quantized_as_their_values(bits: Literal[4, 8], dtype: torch.dtype) -> None:
    short = weight().to(dtype)
    found, expected = GroupedWeight.quantize(short, bits), GroupedWeight.quantize(short.float(), bits)
    assert torch.equal(found.dequantized(), expected.dequantized())


@pytest.mark.parametrize("bits", BITS)
def test_parts_are_quantized_as_the_whole(bits: Literal[4, 8]) -> None:
    exact = weight()
    whole = GroupedWeight.quantize(exact, bits)
    outputs = whole.outputs(slice(5, 17))
    assert torch.equal(outputs.dequantized(), GroupedWeight.quantize(exact[5:17], bits).dequantized())
    inputs = whole.inputs(slice(32, 96))
    assert torch.equal(inputs.dequantized(), GroupedWeight.quantize(exact[:, 32:], bits).dequantized())
    chosen = torch.tensor([3, 3, 0])
    assert torch.equal(whole.outputs(chosen).dequantized(), whole.dequantized()[chosen])
    joined = GroupedWeight.concatenated([whole.outputs(slice(0, 5)), outputs, whole.outputs(slice(17, 24))])
    assert torch.equal(joined.dequantized(), whole.dequantized())
    assert joined.shape == exact.shape


def test_groups_are_not_cut() -> None:
    whole = GroupedWeight.quantize(weight(), 8)
    with pytest.raises(AssertionError, match="16:96"):
        whole.inputs(slice(16, None))
    with pytest.raises(AssertionError, match="48 inputs in groups of 32"):
        GroupedWeight.quantize(weight(num_inputs=48), 8)
