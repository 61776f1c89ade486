"""Published quantized checkpoints give the tokens of their dequantized numbers: kept in their bits, on several ranks,
and streamed."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton.config import ModelConfig
from baton.errors import ModelError
from engine.collectives import Collectives
from engine.layers.backend import LinearLayer, Matrix
from engine.layers.fp8 import Fp8Weight
from engine.layers.grouped_weight import GroupedWeight
from engine.layers.torch_backend import TorchBackend
from engine.loading.loader import LoadedModel, load_model, outline_model, takes_of
from engine.loading.quantized_checkpoint import QuantizedCheckpoint
from engine.loading.quantized_weights import Bits, QuantizedWeights
from engine.loading.streamed_weights import StreamedWeights
from engine.loading.weights import CheckpointWeights, Shard
from engine.model_config import read_architecture
from engine.native.library import native_library
from engine.quantization_config import read_quantization
from tests.factories.host_copies import HostCopies
from tests.factories.models import make_model_dir, set_tensors
from tests.factories.quantized_checkpoints import IN_GROUPS, KINDS, make_quantized
from tests.factories.stepping import StepDriver, load_on_cpu
from tests.factories.threaded_ranks import on_ranks

CPU = torch.device("cpu")
PROMPT = [5, 6, 7, 40, 41, 200, 3]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
needs_kernels = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"), attention_bias=True, **SIZES)


def tokens(model: LoadedModel) -> list[int]:
    return StepDriver(model).generate({"a": PROMPT}, 8)["a"]


def weights_of(folder: Path, *, keeps: bool = False, streams: bool = False) -> QuantizedCheckpoint:
    quantization = read_quantization(json.loads((folder / "config.json").read_text()))
    assert quantization is not None
    takes = takes_of(read_architecture(folder))

    def open_stored(stored: Any) -> Any:
        if streams:
            return StreamedWeights(folder, None, stored, HostCopies())
        return CheckpointWeights(folder, None, stored)

    return QuantizedCheckpoint(
        folder, quantization, torch.float32, takes, open_stored, keeps_groups=keeps, keeps_fp8=keeps
    )


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_the_numbers(tmp_path: Path, source: Path, name: str) -> None:
    quantized, numbers = make_quantized(tmp_path, source, KINDS[name])
    model = load_on_cpu(quantized, quantization="none")
    assert tokens(model) == tokens(load_on_cpu(numbers))
    assert model.quantization is None


@pytest.mark.parametrize("name", ["gptq, 4 bits", "awq", "int8 by channel", "fp8 by channel"])
def test_a_mixtures_experts_and_its_router_are_read(tmp_path: Path, name: str) -> None:
    """The router becomes numbers in any case."""
    sizes = {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2}
    quantized, numbers = make_quantized(
        tmp_path, make_model_dir(tmp_path / "m", "mixtral", **sizes), KINDS[name]
    )
    assert tokens(load_on_cpu(quantized, quantization="none")) == tokens(load_on_cpu(numbers))
    assert len(tokens(load_on_cpu(quantized))) == 8


@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_equal_whole_and_in_ranks_parts(tmp_path: Path, source: Path, name: str) -> None:
    """The parts of 3 ranks also cut groups, blocks and packed integers."""
    quantized, numbers = make_quantized(tmp_path, source, KINDS[name])
    expected = load_file(numbers / "model.safetensors")
    with weights_of(quantized) as weights:
        for module, shape in (("self_attn.q_proj", (128, 128)), ("mlp.down_proj", (128, 256))):
            full = f"model.layers.1.{module}.weight"
            assert torch.equal(weights.take_matrix(full, *shape), expected[full])  # type: ignore[arg-type]
            for dim in (0, 1):
                firsts = (0, 32, 36), (32, 4, shape[dim] - 36)
                shards = [Shard(dim, first=first, size=size) for first, size in zip(*firsts, strict=True)]
                shards += [Shard(dim, rank, 2) for rank in range(2)]
                parts = [weights.take_matrix(full, *shape, shard=shard) for shard in shards]
                assert torch.equal(torch.cat(parts[:3], dim), expected[full])  # type: ignore[arg-type]
                assert torch.equal(torch.cat(parts[3:], dim), expected[full])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", IN_GROUPS)
def test_matrices_stay_in_their_bits_where_groups_are_whole(tmp_path: Path, source: Path, name: str) -> None:
    quantized, numbers = make_quantized(tmp_path, source, KINDS[name])
    expected = load_file(numbers / "model.safetensors")
    bits = 8 if "8" in name.replace("128", "") else 4
    with weights_of(quantized, keeps=True) as weights:
        full = "model.layers.1.mlp.down_proj.weight"
        for shard in (None, Shard(1, 1, 2), Shard(0, 1, 2)):
            kept = weights.take_matrix(full, 128, 256, shard=shard)
            assert isinstance(kept, GroupedWeight)
            assert (kept.bits, kept.group_size) == (bits, 32)
            part = expected[full] if shard is None else expected[full].chunk(2, shard.dim)[1]
            assert torch.equal(kept.dequantized(), part)
        halves = [
            weights.take_matrix(full, 128, 256, shard=Shard(1, first=0, size=size)) for size in (48, 40)
        ]
    assert isinstance(halves[0], GroupedWeight)
    assert halves[0].group_size == 16
    assert isinstance(halves[1], torch.Tensor)


@needs_kernels
@pytest.mark.parametrize("name", ["int8 by channel", "int4, groups of 128", "gptq, 8 bits", "awq"])
def test_on_a_cpu_groups_are_multiplied_as_they_are(
    tmp_path: Path, source: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, numbers = make_quantized(tmp_path, source, KINDS[name])
    caplog.set_level(logging.INFO)
    model, reference = load_on_cpu(quantized), load_on_cpu(quantized, quantization="none")
    method = KINDS[name].config["quant_method"]
    assert model.quantization == method
    assert model.digest == f"{reference.digest}-{method}"
    assert f"quantization_config {method}: 14 matrices stay quantized, 0 were dequantized" in caplog.text
    assert f"{method}: 0 matrices stay quantized, 14 were dequantized to float32" in caplog.text
    assert agreement(model, load_on_cpu(numbers)) > 0.7  # activations are rounded to 8 bits


def agreement(model: LoadedModel, reference: LoadedModel) -> float:
    """The share of equal next tokens, each predicted after the reference's own tokens."""
    expected = tokens(reference)
    found = [
        StepDriver(model).generate({"a": [*PROMPT, *expected[:count]]}, 1)["a"][0]
        for count in range(len(expected))
    ]
    return sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)


@pytest.mark.parametrize("name", ["gptq, act-order", "fp8 by channel"])
def test_what_no_cpu_kernel_takes_is_dequantized(tmp_path: Path, source: Path, name: str) -> None:
    quantized, numbers = make_quantized(tmp_path, source, KINDS[name])
    model = load_on_cpu(quantized)
    assert model.quantization is None
    assert tokens(model) == tokens(load_on_cpu(numbers))


@pytest.mark.parametrize("name", ["fp8 by tensor", "fp8 by channel"])
def test_8_bit_floats_by_output_stay_as_they_are(tmp_path: Path, source: Path, name: str) -> None:
    """They also stay on a GPU that multiplies them. Here `fp8` asks for this, and rounds nothing again."""
    quantized, numbers = make_quantized(tmp_path, source, KINDS[name])
    assert tokens(load_on_cpu(quantized, quantization="fp8")) == tokens(load_on_cpu(numbers))
    with weights_of(quantized, keeps=True) as weights:
        full = "model.layers.0.mlp.down_proj.weight"
        expected = load_file(numbers / "model.safetensors")[full]
        for shard, part in ((None, expected), (Shard(0, 1, 2), expected[64:])):
            kept = weights.take_matrix(full, 128, 256, shard=shard)
            assert isinstance(kept, Fp8Weight)
            assert torch.equal(kept.dequantized(), part)
            some = kept.outputs(torch.tensor([3, 1]))
            assert torch.equal(Fp8Weight.concatenated([some, some]).dequantized(), part[[3, 1, 3, 1]])


def test_a_merged_product_may_have_other_numbers_beside_8_bit_floats(tmp_path: Path, source: Path) -> None:
    """`fp8` then rounds the product's numbers. Numbers that were in 8 bits by channel do not change."""
    quantized, numbers = make_quantized(
        tmp_path,
        source,
        KINDS["fp8 by channel"],
        lambda module: module == "lm_head" or module.endswith("up_proj"),
    )
    assert tokens(load_on_cpu(quantized, quantization="fp8")) == tokens(
        load_on_cpu(numbers, quantization="fp8")
    )
    assert tokens(load_on_cpu(quantized)) == tokens(load_on_cpu(numbers))


@pytest.mark.parametrize("name", ["fp8 by channel", "fp8 by block"])
def test_an_outline_has_the_kinds_of_the_model(tmp_path: Path, source: Path, name: str) -> None:
    """A GPU's kernels are compiled ahead from this outline."""
    quantized, _ = make_quantized(
        tmp_path, source, KINDS[name], lambda module: module == "lm_head" or "layers.1.self_attn" in module
    )
    config, made, outlined = ModelConfig(dtype="float32", quantization="fp8"), Recording(), Recording()
    load_model(config, quantized, CPU, made)
    outline_model(config, quantized, outlined)
    assert outlined.made == made.made
    assert (Fp8Weight in {kind for kind, _ in made.made}) == (name == "fp8 by channel")


class Recording(TorchBackend):
    """Keeps kind and shape of its matrices."""

    def __init__(self) -> None:
        self.made: list[tuple[type, tuple[int, ...]]] = []

    def linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
        self.made.append((type(weight_OI), tuple(weight_OI.shape)))
        return super().linear(weight_OI, bias_O)

    def fp8_linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
        self.made.append((type(weight_OI), tuple(weight_OI.shape)))
        return super().fp8_linear(weight_OI, bias_O)


@pytest.mark.parametrize(
    "name",
    ["fp8 by block", "int4, groups of 64, asymmetric", "gptq, act-order", "gptq, second format", "awq"],
)
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, source: Path, name: str) -> None:
    quantized, numbers = make_quantized(tmp_path, source, KINDS[name])

    def run(collectives: Collectives) -> list[int]:
        config = ModelConfig(dtype="float32", quantization="none")
        return tokens(load_model(config, quantized, CPU, collectives=collectives))

    assert on_ranks(2, run) == [tokens(load_on_cpu(numbers))] * 2


@pytest.mark.parametrize("name", ["fp8 by block", "int4, groups of 64, asymmetric", "gptq, 4 bits", "awq"])
def test_streamed_tensors_are_the_same(tmp_path: Path, source: Path, name: str) -> None:
    """For a GPU, tensors are streamed: they are read ahead, in order."""
    quantized, numbers = make_quantized(tmp_path, source, KINDS[name])
    expected = load_file(numbers / "model.safetensors")
    with weights_of(quantized, streams=True) as weights:
        for take in takes_of(read_architecture(quantized)):
            taken: Any = (weights.take_tensor if len(take.shape) == 1 else weights.take_matrix)(
                take.name, *take.shape
            )
            assert torch.equal(taken, expected[take.name])
        weights.check_all_taken()


@pytest.mark.parametrize("name", ["gptq, 4 bits", "fp8 by channel"])
@pytest.mark.parametrize("architecture", ["phi3", "glm4"])
def test_merged_and_reordered_projections(tmp_path: Path, architecture: str, name: str) -> None:
    """Phi-3's checkpoint has q, k and v as one matrix; GLM-4's outputs of a head are in another order."""
    source = make_model_dir(tmp_path / "source", architecture, head_dim=32, pad_token_id=0, **SIZES)
    quantized, numbers = make_quantized(tmp_path, source, KINDS[name])
    expected = tokens(load_on_cpu(numbers))
    assert tokens(load_on_cpu(quantized, quantization="none")) == expected
    kept = "fp8" if name.startswith("fp8") else "int4"
    assert load_on_cpu(quantized, quantization=kept).quantization == kept
    if kept == "fp8":
        assert tokens(load_on_cpu(quantized, quantization=kept)) == expected


def test_scales_may_be_powers_of_two_in_a_byte(tmp_path: Path, source: Path) -> None:
    """`scale_fmt: ue8m0`."""
    quantized, _ = make_quantized(tmp_path, source, KINDS["fp8 by block"])
    stored = load_file(quantized / "model.safetensors")
    powers = {
        name: tensor.log2().round().exp2()
        for name, tensor in stored.items()
        if name.endswith("weight_scale_inv")
    }
    for dtype in (torch.float32, torch.float8_e8m0fnu):
        set_tensors(quantized, {name: tensor.to(dtype) for name, tensor in powers.items()})
        with weights_of(quantized) as weights:
            found: Any = weights.take_matrix("model.layers.0.mlp.up_proj.weight", 256, 128)
        scale = powers["model.layers.0.mlp.up_proj.weight_scale_inv"].repeat_interleave(48, 0)[:256]
        scale = scale.repeat_interleave(48, 1)[:, :128]
        assert torch.equal(found, stored["model.layers.0.mlp.up_proj.weight"].float() * scale)


def test_in_16_bits_numbers_are_rounded_once(tmp_path: Path, source: Path) -> None:
    quantized, numbers = make_quantized(tmp_path, source, KINDS["gptq, 4 bits"])
    name = "model.layers.0.mlp.up_proj.weight"
    expected = load_file(numbers / "model.safetensors")[name]
    quantization = read_quantization(json.loads((quantized / "config.json").read_text()))
    assert quantization is not None
    for dtype in (torch.float16, torch.bfloat16):
        weights = QuantizedCheckpoint(
            quantized,
            quantization,
            dtype,
            (),
            lambda stored: CheckpointWeights(quantized, None, stored),
            keeps_groups=False,
            keeps_fp8=False,
        )
        assert torch.equal(weights.take_matrix(name, 256, 128), expected.to(dtype))  # type: ignore[arg-type]


def test_lm_head_may_be_quantized_and_layers_may_not(tmp_path: Path, source: Path) -> None:
    kind = KINDS["int4, groups of 32"]
    quantized, numbers = make_quantized(tmp_path, source, kind, lambda module: "layers.1.self_attn" in module)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["re:model.layers.1.self_attn.*"]
    (quantized / "config.json").write_text(json.dumps(config))
    assert tokens(load_on_cpu(quantized, quantization="none")) == tokens(load_on_cpu(numbers))


def test_matrices_with_scales_that_are_ignored_are_refused(tmp_path: Path, source: Path) -> None:
    kind = KINDS["fp8 by channel"]
    quantized, _ = make_quantized(tmp_path, source, kind, lambda _: False)
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is stored as F8_E4M3; supported are F64"):
        load_on_cpu(quantized)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path, source: Path) -> None:
    quantized, _ = make_quantized(tmp_path, source, KINDS["gptq, 4 bits"])
    module = "model.layers.0.mlp.up_proj"
    set_tensors(quantized, {f"{module}.scales": torch.zeros(3, 256)})
    with pytest.raises(ModelError, match=r"up_proj\.scales has shape \[3, 256\], but .* implies \[2, 256\]"):
        load_on_cpu(quantized)
    set_tensors(quantized, {f"{module}.scales": None})
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.scales .* is missing"):
        load_on_cpu(quantized)
    set_tensors(quantized, {f"{module}.scales": torch.zeros(2, 256, dtype=torch.int32)})
    with pytest.raises(ModelError, match=r"up_proj\.scales is stored as I32; supported are F64, F32"):
        load_on_cpu(quantized)


def test_groups_that_do_not_exist_are_named(tmp_path: Path, source: Path) -> None:
    quantized, _ = make_quantized(tmp_path, source, KINDS["gptq, 4 bits"])
    order = torch.zeros(128, dtype=torch.int32)
    order[7] = 2
    set_tensors(quantized, {"model.layers.1.mlp.up_proj.g_idx": order})
    with pytest.raises(ModelError, match=r"up_proj\.g_idx: groups must be 0 to 1, got 0 to 2"):
        load_on_cpu(quantized)


def test_another_shape_is_named(tmp_path: Path, source: Path) -> None:
    quantized, _ = make_quantized(tmp_path, source, KINDS["int4, groups of 32"])
    set_tensors(quantized, {"model.layers.1.mlp.up_proj.weight_shape": torch.tensor([256, 120])})
    with pytest.raises(
        ModelError, match=r"up_proj\.weight_shape is \[256, 120\], but .* implies \[256, 128\]"
    ):
        load_on_cpu(quantized)


def test_biases_of_zero_are_no_biases(tmp_path: Path, source: Path) -> None:
    quantized, _ = make_quantized(tmp_path, source, KINDS["gptq, 4 bits"])
    expected = tokens(load_on_cpu(quantized))
    set_tensors(quantized, {"model.layers.1.mlp.up_proj.bias": torch.zeros(256)})
    assert tokens(load_on_cpu(quantized)) == expected
    set_tensors(quantized, {"model.layers.1.mlp.up_proj.bias": torch.ones(256)})
    with pytest.raises(ModelError, match=r"1 tensors do not belong .*: model\.layers\.1\.mlp\.up_proj\.bias"):
        load_on_cpu(quantized)


def test_scales_of_activations_have_no_effect_and_those_of_kv_only_in_8_bits(
    tmp_path: Path, source: Path
) -> None:
    """test_kv_scales.py tests what they do in 8 bits."""
    quantized, _ = make_quantized(tmp_path, source, KINDS["fp8 by tensor"])
    expected = tokens(load_on_cpu(quantized))
    set_tensors(quantized, {"model.layers.1.mlp.up_proj.input_scale": torch.tensor(0.1)})
    assert tokens(load_on_cpu(quantized)) == expected
    in_8_bits = tokens(load_on_cpu(quantized, kv_cache_dtype="fp8"))
    set_tensors(quantized, {"model.layers.0.self_attn.k_scale": torch.tensor(1e-4)})  # clamps nearly all keys
    set_tensors(quantized, {"model.layers.0.self_attn.v_scale": torch.tensor(1e-4)})
    assert tokens(load_on_cpu(quantized)) == expected
    assert tokens(load_on_cpu(quantized, kv_cache_dtype="fp8")) != in_8_bits


def test_at_most_so_many_bits(tmp_path: Path, source: Path) -> None:
    """int4 keeps 4 bits and rounds 8-bit floats; int8 keeps 4 bits, too."""
    name, size = "model.layers.0.mlp.down_proj.weight", (128, 256)
    cases: list[tuple[str, Bits, int]] = [
        ("awq", 4, 4),
        ("awq", 8, 4),
        ("fp8 by block", 4, 4),
        ("fp8 by block", 8, 8),
    ]
    for kind, bits, expected in cases:
        quantized, _ = make_quantized(tmp_path / f"{kind} {bits}", source, KINDS[kind])
        matrix = QuantizedWeights(weights_of(quantized, keeps=True), bits).take_matrix(name, *size)
        own = weights_of(quantized, keeps=True).take_matrix(name, *size)
        assert isinstance(matrix, GroupedWeight)
        assert matrix.bits == expected
        if kind == "awq":
            assert isinstance(own, GroupedWeight)
            assert torch.equal(matrix.dequantized(), own.dequantized())
        else:
            assert isinstance(own, torch.Tensor)
            assert torch.equal(matrix.dequantized(), GroupedWeight.quantize(own, bits).dequantized())
