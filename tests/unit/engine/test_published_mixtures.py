"""config.json files as they are published, of models with experts that are too large for a test."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.families import Family
from engine.model_config import ModelArchitecture, read_architecture

GLM = {
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
}
GLM_AIR = GLM | {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GLM_FLASH = GLM | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.8,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def read(path: Path, values: dict[str, Any]) -> ModelArchitecture:
    (path / "config.json").write_text(json.dumps(values))
    return read_architecture(path)


@pytest.mark.parametrize(
    ("values", "family", "active"),
    [
        (GLM_AIR, Family.GLM4_MOE, 12e9),
        (GLM_FLASH, Family.GLM4_MOE_LITE, 3e9),
        (MINIMAX, Family.MINIMAX_M2, 10e9),
    ],
    ids=["GLM-4.5-Air", "GLM-4.7-Flash", "MiniMax-M2"],
)
def test_a_token_uses_as_many_weights_as_the_model_is_known_for(
    tmp_path: Path, values: dict[str, Any], family: Family, active: float
) -> None:
    architecture = read(tmp_path, values)
    assert architecture.family is family
    assert round(architecture.weights_per_token / 1e9) == active / 1e9


def test_half_of_a_head_is_rotated(tmp_path: Path) -> None:
    for values in (GLM_AIR, MINIMAX):
        rope, *_ = read(tmp_path, values).ropes
        assert rope is not None
        assert rope.rotary_dim == 64


def test_the_layer_that_guesses_is_not_read(tmp_path: Path) -> None:
    for values, layer in ((GLM_AIR, 46), (GLM_FLASH, 47)):
        assert read(tmp_path, values).unread_tensors == (f"model.layers.{layer}.",)


def test_heads_are_normed_where_the_config_says_so(tmp_path: Path) -> None:
    assert not read(tmp_path, GLM_AIR).has_qk_norm
    assert read(tmp_path, GLM_AIR | {"use_qk_norm": True}).has_qk_norm
