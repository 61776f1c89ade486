"""A quantization_config is read whole: what is not understood is refused by its key."""

from typing import Any

import pytest

from baton.errors import ModelError
from engine.quantization_config import Quantization, read_quantization
from engine.quantization_scheme import Layout, Scheme
from tests.factories.quantized_checkpoints import KINDS, compressed_tensors, gptq

PACKED = compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
UP = "model.layers.3.mlp.up_proj"


def read(config: Any) -> Quantization:
    quantization = read_quantization({"quantization_config": config})
    assert quantization is not None
    return quantization


def scheme(config: Any, module: str = UP) -> Scheme:
    found = read(config).scheme_of(module)
    assert found is not None
    return found


def with_weights(**weights: Any) -> dict[str, Any]:
    group = PACKED["config_groups"]["group_0"]
    return PACKED | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


def with_group(**group: Any) -> dict[str, Any]:
    return PACKED | {"config_groups": {"group_0": PACKED["config_groups"]["group_0"] | group}}


def test_none() -> None:
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None


def test_schemes() -> None:
    assert scheme(PACKED) == Scheme(layout=Layout.PACKED, bits=4, inputs_per_scale=32)
    assert scheme(with_weights(strategy=None, group_size=-1, symmetric=False)) == Scheme(
        layout=Layout.PACKED, bits=4, inputs_per_scale=None, has_zero_points=True
    )
    assert scheme(with_weights(actorder="group")).has_own_order
    assert not scheme(with_weights(actorder="weight")).has_own_order
    tensor = compressed_tensors("naive-quantized", num_bits=8, type="float", strategy="tensor")
    assert scheme(tensor) == Scheme(
        layout=Layout.NUMBERS, bits=8, is_float=True, outputs_per_scale=None, inputs_per_scale=None
    )
    block = {
        "strategy": "block",
        "type": "float",
        "num_bits": 8,
        "block_structure": "128x64",
        "group_size": None,
    }
    found = scheme(with_weights(**block) | {"format": "float-quantized"})
    assert (found.outputs_per_scale, found.inputs_per_scale) == (128, 64)
    assert (scheme(FP8).outputs_per_scale, scheme(FP8).inputs_per_scale) == (128, 128)
    assert scheme(gptq(8, -1)) == Scheme(
        layout=Layout.GPTQ, bits=8, inputs_per_scale=None, has_zero_points=True
    )
    assert scheme(gptq(4, 64, checkpoint_format="gptq_v2", desc_act=True)) == Scheme(
        layout=Layout.GPTQ_V2, bits=4, inputs_per_scale=64, has_zero_points=True, has_own_order=True
    )
    assert scheme(AWQ).layout is Layout.AWQ


def test_which_matrices_may_stay_in_their_bits() -> None:
    stays = {name: scheme(kind.config) for name, kind in KINDS.items()}
    assert {name for name, each in stays.items() if each.can_stay_in_fp8} == {
        "fp8 by tensor",
        "fp8 by channel",
    }
    assert {name for name in stays if not stays[name].can_stay_in_groups} == {
        "fp8 by tensor",
        "fp8 by channel",
        "fp8 by block",
        "gptq, act-order",
    }


def test_targets_by_name_go_before_those_by_class() -> None:
    eight = {"targets": ["re:.*down_proj$", "model.layers.0.mlp.up_proj"], "weights": {"num_bits": 8}}
    four = PACKED["config_groups"]["group_0"]
    groups = {"group_0": four, "group_1": eight | {"format": "int-quantized"}}
    quantization = read(PACKED | {"config_groups": groups, "ignore": ["lm_head", r"re:model\.layers\.5\..*"]})

    def bits(module: str) -> int | None:
        found = quantization.scheme_of(module)
        return None if found is None else found.bits

    assert bits(UP) == 4
    assert bits("model.layers.0.mlp.up_proj") == 8
    assert bits("model.layers.7.mlp.down_proj") == 8
    assert bits("model.layers.5.mlp.down_proj") is None
    assert bits("lm_head") is None
    assert bits("model.embed_tokens") is None  # no Linear


@pytest.mark.parametrize(
    ("targets", "module", "chosen"),
    [
        (("re:.*proj", "layers.0.up_proj"), "layers.0.up_proj", 1),
        (("re:.*proj", "re:.*down_proj"), "layers.0.down_proj", 1),
        (("re:.*down_proj", "re:.*proj"), "layers.0.down_proj", 0),
        (("Linear", "Linear"), "layers.0.down_proj", 1),
    ],
)
def test_of_several_targets_the_one_that_compressed_tensors_takes_counts(
    targets: tuple[str, ...], module: str, chosen: int
) -> None:
    """Exact names, then regular expressions in alphabetical order; of equal targets the last one."""
    groups = {
        str(number): {"targets": [target], "weights": {"num_bits": 4 + 4 * number, "group_size": 32}}
        for number, target in enumerate(targets)
    }
    given = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    quantization = read_quantization({"quantization_config": given})
    assert quantization is not None
    scheme = quantization.scheme_of(module)
    assert scheme is not None
    assert scheme.bits == (4, 8)[chosen]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("awq", "quantization_config must be an object"),
        ({}, "quant_method None is not supported; supported are compressed-tensors, fp8, gptq, awq"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        (PACKED | {"new_key": 1}, r"quantization_config\.new_key is not supported; use other weights"),
        (PACKED | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config .* is not supported"),
        (
            PACKED | {"transform_config": {"config_groups": {"R1": {}}}},
            "transform_config .* is not supported",
        ),
        (PACKED | {"config_groups": {}}, "config_groups must be an object with groups"),
        (
            PACKED | {"format": "marlin-24"},
            "format 'marlin-24' are not supported; supported formats are float",
        ),
        (PACKED | {"ignore": "lm_head"}, "quantization_config.ignore must be a list of names, got 'lm_head'"),
        (
            PACKED | {"ignore": ["re:("]},
            "quantization_config.ignore: 're:\\(' is not a valid regular expression",
        ),
        (
            PACKED | {"ignore": ["re:a{99999999999}"]},
            r"'re:a\{99999999999\}' is not a valid regular expression: the repetition number is too large",
        ),
        (with_group(output_activations={"num_bits": 8}), r"group_0\.output_activations .* is not supported"),
        (with_group(weights=None), r"group_0\.weights must be an object, got None"),
        (with_group(other=1), r"group_0\.other is not supported"),
        (with_weights(num_bits=3), "3 bits of type 'int' in format 'pack-quantized' are not supported"),
        (with_weights(type="float"), "4 bits of type 'float' in format 'pack-quantized' are not supported"),
        (with_weights(strategy="tensor_group"), "weights.strategy 'tensor_group' is not supported"),
        (
            with_weights(strategy=None, group_size=[64]),
            r"weights.group_size must be a positive integer, got \[64",
        ),
        (with_weights(group_size=0), "weights.group_size must be a positive integer, got 0"),
        (with_weights(dynamic=True), "weights.dynamic True is not supported; supported: False"),
        (with_weights(strategy="block", block_structure=[1]), "block_structure must be two sizes"),
        (with_weights(strategy="tensor", symmetric=False), "symmetric false is only supported for integers"),
        (FP8 | {"quant_method": ["fp8"]}, r"quantization_config.quant_method \['fp8'\] is not supported"),
        (FP8 | {"fmt": "e5m2"}, "quantization_config.fmt 'e5m2' is not supported; supported: 'e4m3'"),
        (FP8 | {"weight_block_size": [128, "x"]}, "weight_block_size must be a positive integer, got 'x'"),
        (FP8 | {"weight_block_size": "128x²"}, "weight_block_size must be a positive integer, got '²'"),
        (FP8 | {"weight_per_tensor": True}, "weight_per_tensor is not supported"),
        (gptq(3, 128), "quantization_config.bits 3 is not supported; supported: 4, 8"),
        (gptq(4, 128) | {"bits": None}, "quantization_config.bits is missing"),
        (gptq(4, 0), "quantization_config.group_size must be a positive integer, got 0"),
        (gptq(4, 128, checkpoint_format="marlin"), "checkpoint_format 'marlin' is not supported"),
        (gptq(4, 128, dynamic={"-:.*": {}}), "quantization_config.dynamic .* is not supported"),
        (AWQ | {"version": "gemv"}, "quantization_config.version 'gemv' is not supported; supported: 'gemm'"),
        (AWQ | {"bits": 8}, "quantization_config.bits 8 is not supported; supported: 4"),
        (AWQ | {"backend": "llm-awq"}, "quantization_config.backend 'llm-awq' is not supported"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused_by_its_key(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(config)


def test_compression_config_is_the_older_name_of_compressed_tensors() -> None:
    assert read_quantization({"compression_config": PACKED}) == read(PACKED)
    without_method = {key: value for key, value in PACKED.items() if key != "quant_method"}
    assert read_quantization({"quantization_config": None, "compression_config": without_method}) == read(
        PACKED
    )
    with pytest.raises(ModelError, match=r"compression_config\.other is not supported"):
        read_quantization({"compression_config": PACKED | {"other": 1}})


def test_keys_of_published_checkpoints_are_known() -> None:
    """Their makers write these keys beside those of the other tests."""
    read(PACKED | {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}, "version": "0.9.4"})
    read(
        FP8 | {"activation_scheme": "static", "modules_to_not_convert": ["lm_head"], "kv_cache_scheme": None}
    )
    read(gptq(4, 128, pack_dtype="int32", lm_head=False, static_groups=False, model_file_base_name="model"))
    written_by_gptqmodel = {"pack_dtype": "int32", "lm_head": False, "desc_act": False, "meta": {}}
    read(
        AWQ
        | written_by_gptqmodel
        | {"method": "awq", "format": "gemm", "checkpoint_format": "gemm", "zero_point": False}
    )
    read(
        gptq(4, 128, **written_by_gptqmodel, method="gptq", format="gptq", checkpoint_format="gptq", sym=True)
    )
    read(AWQ | {"do_fuse": False, "modules_to_not_convert": None, "exllama_config": {}})
