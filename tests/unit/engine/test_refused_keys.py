"""A key of a config.json that changes what a model computes is read or refused, never ignored."""

from pathlib import Path
from typing import Any

import pytest

from baton.errors import ModelError
from engine.families import KEYS_READ, VALUES_WITHOUT_EFFECT, Family, refused_keys
from engine.model_config import read_architecture
from engine.rope_config import ROPE_VALUES_WITHOUT_EFFECT
from tests.factories.model_configs import OF_FAMILY, read_config

EFFECTIVE: dict[str, Any] = {
    "alibi": True,
    "attention_chunk_size": 8192,
    "attention_multiplier": 0.3,
    "attn_logit_softcapping": 20.0,
    "attn_temperature_tuning": True,
    "clip_qkv": 8.0,
    "decoder_sparse_step": 2,
    "embedding_multiplier": 3.0,
    "final_logit_softcapping": 5.0,
    "first_k_dense_replace": 2,
    "index_topk": 2048,
    "is_causal": False,
    "kv_lora_rank": 32,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "logit_scale": 0.0625,
    "logits_scaling": 2.0,
    "mlp_layer_types": ["dense", "dense", "sparse"],
    "mlp_only_layers": [1],
    "moe_intermediate_size": 96,
    "moe_layer_freq": 2,
    "n_group": 2,
    "n_routed_experts": 32,
    "n_shared_experts": 3,
    "no_rope_layer_interval": 2,
    "no_rope_layers": [1, 0, 1],
    "norm_topk_prob": False,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "num_local_experts": 6,
    "num_nextn_predict_layers": 2,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 48,
    "qk_layernorm": True,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "query_pre_attn_scalar": 24,
    "residual_multiplier": 0.5,
    "rope_interleave": False,
    "rope_local_base_freq": 123.0,
    "rotary_dim": 8,
    "rotary_pct": 0.5,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "sliding_window": 7,
    "sliding_window_pattern": 2,
    "swiglu_alpha": 1.5,
    "swiglu_limit": 3.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "use_bidirectional_attention": True,
    "use_qk_norm": True,
    "use_sliding_window": True,
    "v_head_dim": 32,
}
"""For each key a value that changes what a model computes."""
LIKE_V3 = {
    "moe_layer_freq": (1, 2),
    "scoring_func": ("sigmoid", "softmax"),
    "topk_method": ("noaux_tc", "greedy"),
}
ONE_VALUE: dict[Family, dict[str, tuple[Any, Any]]] = {
    Family.QWEN3: {"use_qk_norm": (True, False)},
    Family.QWEN3_MOE: {"use_qk_norm": (True, False)},
    Family.MINIMAX_M2: {"scoring_func": ("sigmoid", "softmax"), "use_qk_norm": (True, False)},
    Family.GLM4_MOE: LIKE_V3,
    Family.GLM4_MOE_LITE: LIKE_V3,
    Family.DEEPSEEK_V2: {
        "moe_layer_freq": (1, 2),
        "norm_topk_prob": (False, True),
        "scoring_func": ("softmax", "sigmoid"),
        "topk_method": ("group_limited_greedy", "noaux_tc"),
    },
    Family.DEEPSEEK_V3: LIKE_V3,
}
"""Keys that a family reads to refuse other values: the value that it computes, and another."""


def test_every_key_has_a_value_with_effect() -> None:
    assert set(EFFECTIVE) == set(VALUES_WITHOUT_EFFECT)
    assert set(KEYS_READ) == set(Family)


@pytest.mark.parametrize("family", Family)
def test_what_a_family_does_not_read_is_refused_by_its_key(tmp_path: Path, family: Family) -> None:
    plain = read_config(tmp_path, family)
    for key in refused_keys(family):
        with pytest.raises(ModelError, match=rf"config\.json: {key}.* is not supported for model_type"):
            read_config(tmp_path, family, **{key: EFFECTIVE[key]})
        for harmless in (None, *VALUES_WITHOUT_EFFECT[key]):
            assert read_config(tmp_path, family, **{key: harmless}) == plain
    for harmless_list in ({"layer_types": ["full_attention"] * 3}, {"no_rope_layers": [1] * 3}):
        if not set(harmless_list) & KEYS_READ[family]:
            assert read_config(tmp_path, family, **harmless_list) == plain


@pytest.mark.parametrize("family", Family)
def test_what_a_family_reads_changes_its_architecture(tmp_path: Path, family: Family) -> None:
    plain = read_config(tmp_path, family)
    for key in sorted(KEYS_READ[family] - ONE_VALUE.get(family, {}).keys()):
        base: dict[str, Any] = {"no_rope_layers": None} if key == "no_rope_layer_interval" else {}
        value = not OF_FAMILY[family][key] if key == "use_sliding_window" else EFFECTIVE[key]
        assert read_config(tmp_path, family, **base, **{key: value}) != (
            read_config(tmp_path, family, **base) if base else plain
        ), key


@pytest.mark.parametrize("family", ONE_VALUE)
def test_what_a_family_computes_in_one_way_is_refused_in_others(tmp_path: Path, family: Family) -> None:
    plain = read_config(tmp_path, family)
    for key, (own, other) in ONE_VALUE[family].items():
        assert read_config(tmp_path, family, **{key: own}) == plain
        with pytest.raises(ModelError, match=rf"{key} {other!r} is not supported; only"):
            read_config(tmp_path, family, **{key: other})


@pytest.mark.parametrize("key", ROPE_VALUES_WITHOUT_EFFECT)
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_what_is_not_honoured_of_a_rotation_is_refused_by_its_key(
    tmp_path: Path, name: str, key: str
) -> None:
    for value in (None, *ROPE_VALUES_WITHOUT_EFFECT[key]):
        assert read_config(tmp_path, Family.LLAMA, **{name: {key: value}}) == read_config(
            tmp_path, Family.LLAMA
        )
    for value in (0.7, [16, 24, 24]):
        with pytest.raises(ModelError, match=rf"{key} .* of a rotation is not supported"):
            read_config(tmp_path, Family.LLAMA, **{name: {key: value}})


def test_a_window_that_is_switched_off_is_no_window(tmp_path: Path) -> None:
    plain = read_config(tmp_path, Family.LLAMA)
    assert read_config(tmp_path, Family.LLAMA, sliding_window=9, use_sliding_window=False) == plain


@pytest.mark.parametrize("family", Family)
def test_another_activation_is_refused(tmp_path: Path, family: Family) -> None:
    own = "gelu_pytorch_tanh" if family.is_gemma else "silu"
    assert read_config(tmp_path, family, hidden_act=own, hidden_activation=own) == read_config(
        tmp_path, family
    )
    for key in ("hidden_act", "hidden_activation"):
        with pytest.raises(ModelError, match=rf"{key} 'relu2' is not supported; only '{own}' is"):
            read_config(tmp_path, family, **{key: "relu2"})


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        (
            Family.GRANITE,
            "residual_multiplier",
            0.0,
            "residual_multiplier must be a positive number, got 0.0",
        ),
        (
            Family.GRANITE,
            "attention_multiplier",
            "x",
            "attention_multiplier must be a positive number, got 'x'",
        ),
        (Family.GRANITE, "logits_scaling", -2.0, "logits_scaling must be a positive number"),
        (Family.GEMMA2, "attn_logit_softcapping", 0.0, "attn_logit_softcapping must be a positive number"),
        (Family.GEMMA3, "query_pre_attn_scalar", -1, "query_pre_attn_scalar must be a positive number"),
        (Family.GEMMA3, "layer_types", ["full_attention"], "layer_types must list"),
        (Family.GEMMA3, "rope_parameters", {"chunked": {}}, "rope_parameters: 'chunked' is not supported"),
        (Family.SMOLLM3, "no_rope_layers", [1, 0], "no_rope_layers must list 0 or 1 for each of 3 layers"),
        (Family.QWEN2, "max_window_layers", "all", "max_window_layers must be an integer, got 'all'"),
        (
            Family.GLM4,
            "partial_rotary_factor",
            0.01,
            "partial_rotary_factor 0.01 of heads of 128 does not give an even",
        ),
        (
            Family.MIXTRAL,
            "num_experts_per_tok",
            9,
            "num_experts_per_tok must be at most the number of experts, 8, got 9",
        ),
        (
            Family.GLM4_MOE_LITE,
            "mlp_layer_types",
            ["dense"],
            "mlp_layer_types must list 'dense' or 'sparse' for",
        ),
        (
            Family.GLM4_MOE,
            "first_k_dense_replace",
            -1,
            "first_k_dense_replace must be an integer of at least 0",
        ),
        (
            Family.MINIMAX_M2,
            "qk_norm_type",
            "per_head",
            "qk_norm_type 'per_head' is not supported; only 'per_la",
        ),
        (Family.MINIMAX_M2, "use_routing_bias", False, "use_routing_bias False is not supported; only True"),
        (
            Family.MINIMAX_M2,
            "rotary_dim",
            32,
            "partial_rotary_factor 2.0 of heads of 16 does not give an even",
        ),
        (Family.MIXTRAL, "num_local_experts", 0, "num_local_experts must be a positive integer, got 0"),
        (
            Family.MIXTRAL,
            "num_local_experts",
            10**9,
            "num_local_experts must be at most 4,096, got 1000000000",
        ),
        (Family.GRANITE, "residual_multiplier", 1e-300, "residual_multiplier must be a positive number"),
        (Family.GPT_OSS, "swiglu_limit", 0, "swiglu_limit must be a positive number, got 0"),
        (
            Family.GPT_OSS,
            "experts_per_token",
            2,
            "num_experts_per_tok (4) and experts_per_token (2) must be equal",
        ),
        (Family.QWEN3_MOE, "moe_intermediate_size", "x", "moe_intermediate_size must be a positive integer"),
        (Family.QWEN3_MOE, "decoder_sparse_step", 0, "decoder_sparse_step must be a positive integer, got 0"),
        (Family.QWEN3_MOE, "mlp_only_layers", 1, "mlp_only_layers must be a list of layers, got 1"),
        (
            Family.QWEN3_MOE,
            "shared_expert_intermediate_size",
            64,
            "shared_expert_intermediate_size 64 is not",
        ),
        (
            Family.PHI3,
            "rope_scaling",
            {"type": "llama3"},
            "rope type 'llama3' is not supported; supported are default",
        ),
        (
            Family.PHI3,
            "rope_scaling",
            {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 8},
            "rope type 'longrope' needs short_factor, a list of 8 positive numbers",
        ),
    ],
)
def test_values_that_cannot_be_are_named(
    tmp_path: Path, family: Family, key: str, value: object, message: str
) -> None:
    with pytest.raises(ModelError) as raised:
        read_config(tmp_path, family, **{key: value})
    assert message in str(raised.value)


def test_longrope_s_factors_follow_the_longest_request(tmp_path: Path) -> None:
    """`su` and `yarn` are former names of LongRoPE."""
    scaling = {"short_factor": [1.5] * 8, "long_factor": [3.0] * 8}
    for name in ("longrope", "su", "yarn"):
        phi3 = {"original_max_position_embeddings": 512, "rope_scaling": {"type": name, **scaling}}
        read_config(tmp_path, Family.PHI3, **phi3)
        for max_model_len, key in ((None, "long_factor"), (513, "long_factor"), (512, "short_factor")):
            for rope in read_architecture(tmp_path, max_model_len).ropes:
                assert rope is not None
                assert (rope.divisors_key, rope.factor) == (key, 2.0)
                assert rope.divisors == tuple(scaling[key])


def test_gemma_3_s_two_rotations_may_be_written_in_two_ways(tmp_path: Path) -> None:
    old = read_config(
        tmp_path,
        Family.GEMMA3,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    assert old == read_config(tmp_path, Family.GEMMA3, rope_parameters=kinds)
    sliding, _, full = old.ropes
    assert sliding is not None
    assert full is not None
    assert (sliding.theta, sliding.factor, full.theta, full.factor) == (2e4, 1.0, 5e5, 8.0)
    assert old.sliding_windows == (4096, 4096, None)
