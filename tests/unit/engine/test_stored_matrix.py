"""Zero points and orders of quantized matrices, in shapes and values that only some writers choose."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.loading.loader import takes_of
from engine.loading.quantized_checkpoint import QuantizedCheckpoint
from engine.loading.weights import CheckpointWeights
from engine.model_config import read_architecture
from engine.quantization_config import read_quantization
from tests.factories.models import make_model_dir
from tests.factories.quantized_checkpoints import Kind, Written, compressed_tensors, make_quantized, packed


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_all_outputs_may_share_a_zero_point(tmp_path: Path, shape: tuple[int, ...]) -> None:
    def write(weight: torch.Tensor) -> Written:
        low, high = weight.aminmax()
        scale = (high - low) / 255
        zero = (-128 - low / scale).round()
        values = (weight / scale + zero).round().clamp(-128, 127)
        tensors = {
            "weight": values.to(torch.int8),
            "weight_scale": scale.view(shape),
            "weight_zero_point": zero.to(torch.int8).view(shape),
        }
        return tensors, (values - zero) * scale

    config = compressed_tensors("int-quantized", num_bits=8, type="int", strategy="tensor")
    source = make_model_dir(tmp_path / "m", num_hidden_layers=1)
    quantized, numbers = make_quantized(tmp_path, source, Kind(config, write))
    assert_close(quantized, numbers)


def test_an_order_that_was_never_set_is_no_order(tmp_path: Path) -> None:
    """compressed-tensors fills it with -1 before it calibrates."""

    def write(weight: torch.Tensor) -> Written:
        tensors, numbers = packed(weight, 4, 32)
        return tensors | {"weight_g_idx": torch.full(weight.shape[1:], -1, dtype=torch.int32)}, numbers

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "group"}
    config = compressed_tensors("pack-quantized", **weights)
    source = make_model_dir(tmp_path / "m", num_hidden_layers=1)
    assert_close(*make_quantized(tmp_path, source, Kind(config, write)))


def assert_close(quantized: Path, numbers: Path) -> None:
    """A matrix of a quantized checkpoint, read beside its numbers."""
    quantization = read_quantization(json.loads((quantized / "config.json").read_text()))
    assert quantization is not None
    takes = takes_of(read_architecture(quantized))
    name, size = "model.layers.0.mlp.down_proj.weight", (64, 128)
    with QuantizedCheckpoint(
        quantized,
        quantization,
        torch.float32,
        takes,
        lambda stored: CheckpointWeights(quantized, None, stored),
        keeps_groups=False,
        keeps_fp8=False,
    ) as weights:
        matrix = weights.take_matrix(name, *size)
    assert isinstance(matrix, torch.Tensor)
    torch.testing.assert_close(matrix, load_file(numbers / "model.safetensors")[name])
