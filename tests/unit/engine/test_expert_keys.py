"""Keys of a config.json about experts and latents: what they mean, and which values cannot be."""

import math
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ModelError
from engine.activation import ClampedSwiglu
from engine.families import Family
from engine.mixture_config import Mixture
from engine.rope_config import RopeConfig, RopeType
from tests.factories.model_configs import read_config


def test_deepseek_v2_chooses_by_groups_only_if_it_says_so(tmp_path: Path) -> None:
    for method, num_groups in (("group_limited_greedy", 4), ("greedy", 1), (None, 1)):
        *_, mixture = read_config(tmp_path, Family.DEEPSEEK_V2, topk_method=method).mixtures
        assert mixture is not None
        assert mixture.num_groups == num_groups


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention_bias", True, "attention_bias True is not supported for model_type 'deepseek_v3'"),
        ("num_key_value_heads", 2, "num_key_value_heads (2) must equal num_attention_heads (4)"),
        ("qk_rope_head_dim", 7, "qk_rope_head_dim must be even, got 7"),
        ("kv_lora_rank", 0, "kv_lora_rank must be a positive integer, got 0"),
        ("qk_nope_head_dim", 2**30, "qk_nope_head_dim must be at most 262,144, got 1073741824"),
        ("kv_lora_rank", 7, "kv_lora_rank must be even, got 7"),
        ("q_lora_rank", "x", "q_lora_rank must be a positive integer, got 'x'"),
        ("first_k_dense_replace", -1, "first_k_dense_replace must be an integer of at least 0, got -1"),
        ("n_group", 7, "n_group must divide the 256 experts into equal groups of two or more, got 7"),
        ("n_group", 256, "n_group must divide the 256 experts into equal groups of two or more, got 256"),
        ("topk_group", 5, "topk_group must be at most n_group, 4, got 5"),
        ("num_experts_per_tok", 129, "num_experts_per_tok must be at most the 128 experts of a choice"),
        ("n_shared_experts", 0, "n_shared_experts must be a positive integer, got 0"),
        ("routed_scaling_factor", 0, "routed_scaling_factor must be a positive number, got 0"),
        ("num_nextn_predict_layers", "x", "num_nextn_predict_layers must be an integer from 0 to 1,024"),
        ("num_nextn_predict_layers", 10**9, "num_nextn_predict_layers must be an integer from 0 to 1,024"),
        ("n_routed_experts", 10**9, "n_routed_experts must be at most 4,096, got 1000000000"),
    ],
)
def test_values_that_deepseek_cannot_have_are_named(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    with pytest.raises(ModelError) as raised:
        read_config(tmp_path, Family.DEEPSEEK_V3, **{key: value})
    assert message in str(raised.value)


def test_yarn_s_temperature_is_in_the_scale_as_far_as_it_is_not_in_the_rotation(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}
    for weight, factor in ((1.0, 1.0 + 0.1 * math.log(40)), (0, 1.0), (0.5, 1.0 + 0.05 * math.log(40))):
        scaling = {**yarn, "mscale_all_dim": weight}
        read_in = read_config(
            tmp_path, Family.DEEPSEEK_V3, max_position_embeddings=163840, rope_scaling=scaling
        )
        assert read_in.attention_scale == pytest.approx(192**-0.5 * factor**2)


def test_the_number_of_experts_has_two_names(tmp_path: Path) -> None:
    for family in (Family.QWEN3_MOE, Family.MIXTRAL, Family.GPT_OSS):
        one = read_config(tmp_path, family, num_experts=16)
        assert one == read_config(tmp_path, family, num_local_experts=16)
        assert one == read_config(tmp_path, family, num_experts=16, num_local_experts=16)
        with pytest.raises(ModelError, match=r"num_experts \(16\) and num_local_experts \(8\) must be equal"):
            read_config(tmp_path, family, num_experts=16, num_local_experts=8)


def test_a_sparse_config_gets_the_experts_of_its_family(tmp_path: Path) -> None:
    """transformers takes the same experts."""
    qwen, mixtral = (
        read_config(tmp_path, family).mixtures[0] for family in (Family.QWEN3_MOE, Family.MIXTRAL)
    )
    own = Mixture(num_experts=128, num_chosen=4, intermediate_size=768, is_normalized=True)  # by OF_FAMILY
    assert qwen == own
    assert mixtral == Mixture(num_experts=8, num_chosen=2, intermediate_size=128, is_normalized=True)


@pytest.mark.parametrize(
    ("overrides", "sparse"),
    [
        ({}, [0, 1, 2]),
        ({"decoder_sparse_step": 2}, [1]),
        ({"decoder_sparse_step": 3}, [2]),
        ({"mlp_only_layers": [1]}, [0, 2]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, []),
    ],
    ids=str,
)
def test_which_layers_of_qwen3_moe_have_experts(
    tmp_path: Path, overrides: dict[str, Any], sparse: list[int]
) -> None:
    mixtures = read_config(tmp_path, Family.QWEN3_MOE, **overrides).mixtures
    assert [layer for layer, mixture in enumerate(mixtures) if mixture is not None] == sparse


def test_a_sparse_gpt_oss_has_what_transformers_takes(tmp_path: Path) -> None:
    a = read_config(tmp_path, Family.GPT_OSS)
    assert (a.head_dim, a.num_kv_heads, a.has_qkv_bias, a.has_o_bias, a.has_sinks) == (
        64,
        2,
        True,
        True,
        True,
    )
    assert a.sliding_windows == (128, None, 128)
    assert a.ropes[0] == RopeConfig(
        rope_type=RopeType.YARN,
        theta=150_000.0,
        factor=32.0,
        original_max_position_embeddings=4096,
        extended_length=32 * 4096,
        truncate=False,
    )
    assert a.mixtures[0] == Mixture(
        num_experts=128,
        num_chosen=4,
        intermediate_size=128,
        is_normalized=True,
        activation=ClampedSwiglu(alpha=1.702, limit=7.0),
    )
