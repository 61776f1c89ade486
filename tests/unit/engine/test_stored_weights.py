"""Which of a checkpoint's matrices are counted as kept in their bits: those that the loader keeps."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import BatonConfig, ModelConfig
from engine.collectives import SilentRank
from engine.layers.grouped_weight import GROUP_SIZES
from engine.loading.coded_matrix import CodedMatrix
from engine.loading.footprint import footprint
from engine.loading.loader import load_model
from engine.native.library import native_library
from engine.quantization_scheme import SMALLEST_GROUP, Layout, Scheme
from tests.factories.families import GPT_OSS
from tests.factories.models import make_model_dir
from tests.factories.quantized_checkpoints import (
    Kind,
    compressed_tensors,
    make_mxfp4,
    make_quantized,
    packed,
)
from tests.factories.stepping import load_on_cpu

needs_kernels = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("group_size", [None, 8, 16, 24, 48, 64, 96, 400])
@pytest.mark.parametrize("num_inputs", [96, 144, 192, 360])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_groups_stay_where_the_loader_keeps_them(
    group_size: int | None, num_inputs: int, num_ranks: int
) -> None:
    scheme = Scheme(layout=Layout.PACKED, bits=4, inputs_per_scale=group_size)
    groups_I = torch.arange(num_inputs) // (group_size or num_inputs)
    num_groups = int(groups_I[-1]) + 1
    own = num_inputs // num_ranks
    parts = [
        CodedMatrix(
            torch.zeros(2, own, dtype=torch.uint8),
            4,
            torch.ones(2, num_groups),
            torch.zeros(2, num_groups),
            groups_I[rank * own : (rank + 1) * own],
        )
        for rank in range(num_ranks)
    ]
    assert scheme.stays_in_groups(num_inputs, num_ranks) == all(part.grouped() is not None for part in parts)
    assert min(GROUP_SIZES) == SMALLEST_GROUP


@needs_kernels
def test_a_method_is_named_only_if_a_matrix_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No kernel multiplies groups of 24 inputs."""
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 24}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 24}
    kind = Kind(compressed_tensors("pack-quantized", **weights), lambda weight: packed(weight, 4, 24))
    quantized, _ = make_quantized(tmp_path, make_model_dir(tmp_path / "m", **sizes), kind)
    with caplog.at_level(logging.INFO):
        model = load_on_cpu(quantized)
    assert "0 matrices stay quantized, 21 were dequantized" in caplog.text
    assert model.quantization is None
    takes = footprint(BatonConfig.from_mapping({"model": {"dtype": "float32"}}), quantized)
    assert takes.weights is not None
    assert takes.weight_bytes == 4 * takes.weights.num_parameters


@needs_kernels
@pytest.mark.parametrize(("num_ranks", "is_kept"), [(1, True), (4, True), (8, False)])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_what_ranks_cut_is_counted_as_numbers(
    tmp_path: Path, num_ranks: int, is_kept: bool, expert_parallel: bool
) -> None:
    """An eighth of 960 columns cuts groups of 16; the inputs of gates and ups are not divided."""
    sizes = GPT_OSS | {"intermediate_size": 960, "num_local_experts": 8, "vocab_size": 304}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1}
    quantized, numbers = make_mxfp4(tmp_path, make_model_dir(tmp_path / "m", "gpt_oss", **sizes))
    model, engine = {"dtype": "bfloat16"}, {"tensor_parallel": num_ranks}
    if num_ranks > 1:
        engine |= {"enable_expert_parallel": expert_parallel}
    takes, plain = (
        footprint(BatonConfig.from_mapping({"model": model, "engine": engine}), folder)
        for folder in (quantized, numbers)
    )
    matrix = 8 * 64 * 960
    saved = (3 if is_kept or expert_parallel else 2) * matrix * (2 - 5.25 / 8)
    assert plain.weight_bytes - takes.weight_bytes == pytest.approx(saved, rel=0.05)
    rank = SilentRank(0, num_ranks)
    loaded = load_model(ModelConfig(dtype="float32"), quantized, torch.device("cpu"), collectives=rank)
    assert loaded.quantization == "mxfp4"
