"""gpt-oss's checkpoints: all experts of a layer in one tensor, as numbers and in MXFP4, against transformers."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton.config import ModelConfig
from baton.errors import ModelError
from engine.collectives import Collectives
from engine.layers.grouped_weight import GroupedWeight
from engine.loading.loader import load_model, takes_of
from engine.loading.streamed_weights import StreamedWeights
from engine.loading.weights import CheckpointWeights, Shard
from engine.model_config import read_architecture
from engine.native.library import native_library
from tests.factories.families import GPT_OSS
from tests.factories.host_copies import HostCopies
from tests.factories.models import make_model_dir, set_tensors
from tests.factories.quantized_checkpoints import make_mxfp4
from tests.factories.stepping import load_on_cpu
from tests.factories.threaded_ranks import on_ranks
from tests.unit.engine.test_quantized_checkpoint import agreement, tokens, weights_of

SIZES: dict[str, Any] = GPT_OSS | {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2}
EXPERTS = "model.layers.1.mlp.experts"
SHAPES = {"gate_up_proj": (256, 96), "down_proj": (96, 128)}
"""Outputs and inputs of an expert's matrices."""
needs_kernels = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"), "gpt_oss", **SIZES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, source: Path) -> tuple[Path, Path]:
    """The checkpoint in MXFP4, and a checkpoint with the numbers that transformers dequantizes."""
    return make_mxfp4(tmp_path_factory.mktemp("mxfp4"), source)


def test_each_expert_is_a_part_of_one_tensor(source: Path) -> None:
    """Reads whole experts and the shares of ranks, from mapped files and as a GPU reads them."""
    stored = load_file(source / "model.safetensors")
    with CheckpointWeights(source, torch.float32) as weights:
        for name, shape in SHAPES.items():
            part = f"{EXPERTS}.4.{name}"
            expected_OI = stored[f"{EXPERTS}.{name}"][4].t()
            assert torch.equal(weights.take_tensor(f"{part}.weight", *shape), expected_OI)
            assert torch.equal(
                weights.take_tensor(f"{part}.bias", shape[0]), stored[f"{EXPERTS}.{name}_bias"][4]
            )
            for dim in (0, 1):
                shares = [
                    weights.take_tensor(f"{part}.weight", *shape, shard=Shard(dim, rank, 2))
                    for rank in range(2)
                ]
                assert torch.equal(torch.cat(shares, dim), expected_OI)
        takes = takes_of(read_architecture(source))
        with StreamedWeights(source, torch.float32, takes, HostCopies()) as streamed:
            for take in takes:
                found = streamed.take_tensor(take.name, *take.shape, shard=take.shard)
                assert torch.equal(found, weights.take_tensor(take.name, *take.shape, shard=take.shard))
            streamed.check_all_taken()


def test_experts_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "gpt_oss", **SIZES)
    name = f"{EXPERTS}.down_proj_bias"
    tensors = load_file(path / "model.safetensors")
    bias_XE = tensors[name]
    set_tensors(path, {name: bias_XE[:5].clone()})
    with pytest.raises(ModelError, match=r"experts\.5\.down_proj\.bias .* is missing"):
        load_on_cpu(path)
    set_tensors(path, {name: torch.cat((bias_XE, bias_XE[:1]))})
    with pytest.raises(ModelError, match=r"do not belong .*experts\.6\.down_proj\.bias"):
        load_on_cpu(path)


def test_numbers_are_those_of_transformers(folders: tuple[Path, Path]) -> None:
    """They are equal to the bit, also in the parts of 3 ranks, which cut blocks, and if they are streamed."""
    quantized, numbers = folders
    stored = load_file(numbers / "model.safetensors")
    with weights_of(quantized) as weights:
        for name, shape in SHAPES.items():
            full, expected_OI = f"{EXPERTS}.4.{name}.weight", stored[f"{EXPERTS}.{name}"][4].t()
            assert torch.equal(weights.take_matrix(full, *shape), expected_OI)  # type: ignore[arg-type]
            for dim in (0, 1):
                firsts = (0, 32, 36), (32, 4, shape[dim] - 36)
                shards = [Shard(dim, first=first, size=size) for first, size in zip(*firsts, strict=True)]
                parts = [weights.take_matrix(full, *shape, shard=shard) for shard in shards]
                assert torch.equal(torch.cat(parts, dim), expected_OI)  # type: ignore[arg-type]
    with weights_of(quantized, streams=True) as streamed:
        for take in takes_of(read_architecture(quantized)):
            assert streamed.take_tensor(take.name, *take.shape).shape == take.shape
        streamed.check_all_taken()


def test_matrices_stay_in_4_bits_where_blocks_are_whole(folders: tuple[Path, Path]) -> None:
    quantized, numbers = folders
    expected_OI = load_file(numbers / "model.safetensors")[f"{EXPERTS}.down_proj"][2].t()
    full, shape = f"{EXPERTS}.2.down_proj.weight", SHAPES["down_proj"]
    with weights_of(quantized, keeps=True) as weights:
        for shard, part in (
            (None, expected_OI),
            (Shard(0, 1, 2), expected_OI[48:]),
            (Shard(1, 1, 2), expected_OI[:, 64:]),
        ):
            kept = weights.take_matrix(full, *shape, shard=shard)
            assert isinstance(kept, GroupedWeight)
            assert (kept.bits, kept.group_size, kept.is_e2m1) == (4, 32, True)
            assert torch.equal(kept.dequantized(), part)
        halves = weights.take_matrix(full, *shape, shard=Shard(1, first=0, size=48))
        assert isinstance(halves, GroupedWeight)
        assert torch.equal(halves.dequantized(), expected_OI[:, :48])
        assert isinstance(weights.take_matrix(full, *shape, shard=Shard(1, first=0, size=40)), torch.Tensor)


def test_tokens_are_those_of_the_numbers_alone_and_with_ranks(folders: tuple[Path, Path]) -> None:
    quantized, numbers = folders
    expected = tokens(load_on_cpu(numbers))
    model = load_on_cpu(quantized, quantization="none")
    assert model.quantization is None
    assert tokens(model) == expected

    config = ModelConfig(dtype="float32", quantization="none")

    def run(collectives: Collectives) -> list[int]:
        return tokens(load_model(config, quantized, torch.device("cpu"), collectives=collectives))

    assert on_ranks(2, run) == [expected] * 2


@needs_kernels
def test_on_a_cpu_experts_are_multiplied_in_4_bits(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """This also holds if other matrices are rounded while they are loaded."""
    quantized, numbers = folders
    caplog.set_level(logging.INFO)
    model, plain = load_on_cpu(quantized), load_on_cpu(numbers)
    assert model.quantization == "mxfp4"
    assert model.digest.endswith("-mxfp4")
    assert "quantization_config mxfp4: 24 matrices stay quantized, 0 were dequantized" in caplog.text
    for kept in (model, load_on_cpu(quantized, quantization="int8")):
        assert agreement(kept, plain) > 0.7  # activations are rounded to 8 bits
