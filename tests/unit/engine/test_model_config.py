"""config.json files of the past and present, and those that cannot be served."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from baton.errors import ModelError
from engine.loading.loader import takes_of
from engine.model_config import ModelArchitecture, read_architecture
from engine.rope_config import RopeConfig, RopeType
from tests.factories.families import CASES
from tests.factories.models import make_model_dir

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}


def read(path: Path, **overrides: Any) -> ModelArchitecture:
    """Reads a Llama config with some keys replaced; None takes a key away."""
    values = {key: value for key, value in {**LLAMA, **overrides}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(values))
    return read_architecture(path)


def test_a_sparse_config_gets_the_architecture_s_defaults(tmp_path: Path) -> None:
    llama = read(tmp_path)
    assert (llama.num_kv_heads, llama.head_dim, llama.rms_norm_eps) == (4, 16, 1e-6)
    assert llama.ropes == (RopeConfig(),) * 3
    assert llama.sliding_windows == (None, None, None)
    options = (llama.has_qkv_bias, llama.has_o_bias, llama.has_mlp_bias, llama.has_qk_norm)
    assert not any(options)


def test_options_follow_the_architecture(tmp_path: Path) -> None:
    llama = read(tmp_path, attention_bias=True, mlp_bias=True, head_dim=24, num_key_value_heads=2)
    assert (llama.has_qkv_bias, llama.has_o_bias, llama.has_mlp_bias) == (True, True, True)
    assert (llama.head_dim, llama.num_kv_heads) == (24, 2)
    qwen2 = read(tmp_path, architectures=["Qwen2ForCausalLM"], num_key_value_heads=4)
    assert (qwen2.has_qkv_bias, qwen2.has_o_bias, qwen2.has_qk_norm) == (True, False, False)
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"], num_key_value_heads=4)
    assert (qwen3.has_qkv_bias, qwen3.has_qk_norm, qwen3.head_dim) == (False, True, 128)


def test_model_type_serves_where_architectures_is_absent(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=None, model_type="qwen2", num_key_value_heads=4).has_qkv_bias


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_has_32_kv_heads_unless_it_says_otherwise(tmp_path: Path, model_type: str) -> None:
    """transformers does the same: a missing key means 32, and null means as many as heads."""
    values = {
        **LLAMA,
        "architectures": None,
        "model_type": model_type,
        "num_attention_heads": 64,
        "head_dim": 16,
    }
    for overrides, expected in (({}, 32), ({"num_key_value_heads": None}, 64)):
        (tmp_path / "config.json").write_text(json.dumps(values | overrides))
        assert read_architecture(tmp_path).num_kv_heads == expected
        assert AutoConfig.from_pretrained(tmp_path).num_key_value_heads == expected


@pytest.mark.parametrize(
    ("overrides", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4, "sliding_window": 9}, (9, 9, 9)),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4}, (4096,) * 3),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "num_key_value_heads": 4,
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 9, None),
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4, "sliding_window": 9},
            (None,) * 3,
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "num_key_value_heads": 4,
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 2,
            },
            (None, None, 9),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "num_key_value_heads": 4,
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, None, 9),
        ),
        (
            {"architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 5, "sliding_window": 9},
            (9, 9, 9, None, 9),
        ),
    ],
)
def test_sliding_windows(tmp_path: Path, overrides: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(tmp_path, **overrides).sliding_windows == windows


def test_mistral_may_switch_its_window_off(tmp_path: Path) -> None:
    values = {
        **LLAMA,
        "architectures": ["MistralForCausalLM"],
        "num_key_value_heads": 4,
        "sliding_window": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_architecture(tmp_path).sliding_windows == (None, None, None)


@pytest.mark.parametrize("window", [0, -5, 4096.0, "all"], ids=str)
@pytest.mark.parametrize(
    "overrides",
    [
        {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4},
        {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4, "use_sliding_window": True},
    ],
    ids=["mistral", "qwen2"],
)
def test_an_impossible_window_is_refused(tmp_path: Path, overrides: dict[str, Any], window: object) -> None:
    with pytest.raises(
        ModelError, match=f"sliding_window must be a positive integer or null, got {window!r}"
    ):
        read(tmp_path, **overrides, sliding_window=window)


def test_both_spellings_of_rope_scaling_mean_the_same(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    new = read(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    old = read(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    oldest = read(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    assert new == old == oldest
    rope = RopeConfig(
        rope_type=RopeType.LLAMA3,
        theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=128,
    )
    assert new.ropes == (rope,) * 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported are Llama"),
        ({"architectures": None, "model_type": "mamba"}, "'mamba' is not supported"),
        ({"sliding_window": 9}, "sliding_window 9 is not supported for model_type 'llama'"),
        (
            {"quantization_config": {"quant_method": "quip"}},
            "quantization_config.quant_method 'quip' is not supp",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only 'silu' is"),
        (
            {"hidden_activation": "gelu_pytorch_tanh"},
            "hidden_activation 'gelu_pytorch_tanh' is not supported",
        ),
        ({"act_fn": "relu"}, "act_fn 'relu' is not supported"),
        ({"mlp_activation": {"type": "gelu"}}, "mlp_activation {'type': 'gelu'} is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"num_key_value_heads": -1}, "num_key_value_heads must be a positive integer, got -1"),
        ({"head_dim": -16}, "head_dim must be a positive integer, got -16"),
        ({"head_dim": 2**30}, "head_dim must be at most 262,144, got 1073741824"),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        (
            {"architectures": "LlamaForCausalLM"},
            "architectures must be a list of names, got 'LlamaForCausalLM'",
        ),
        ({"architectures": [["x"]]}, "architecture ['x'] is not supported"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a positive number, got 'x'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object, got [1]"),
        (
            {"quantization_config": {"quant_method": ["x"]}},
            "quantization_config.quant_method ['x'] is not supp",
        ),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be a positive integer, got '3'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1,024, got 1000000000"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "num_key_value_heads": 4,
                "use_sliding_window": True,
                "layer_types": ["chunked_attention"] * 3,
            },
            "layer_types must list",
        ),
        (
            {
                "architectures": ["SmolLM3ForCausalLM"],
                "num_key_value_heads": 4,
                "sliding_window": 9,
                "layer_types": ["sliding_attention"] * 3,
            },
            "layer_types has 'sliding_attention', but sliding_window is null, or use_sliding_window is not true",
        ),
    ],
)
def test_what_would_change_results_is_refused_by_name(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as raised:
        read(tmp_path, **overrides)
    assert message in str(raised.value)
    assert str(tmp_path / "config.json") in str(raised.value)


def test_keys_that_name_silu_or_no_activation_pass(tmp_path: Path) -> None:
    harmless = {
        "hidden_activation": "silu",
        "act_fn": "swish",
        "activation_dropout": 0.1,
        "use_activation_checkpointing": True,
        "attention_factor": 2.0,
    }
    assert read(tmp_path, **harmless) == read(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected a JSON object, got list"):
        read_architecture(tmp_path)


@pytest.mark.parametrize("name", ["granite", "qwen3 moe", "deepseek v2", "deepseek v3, yarn, whole queries"])
def test_weights_of_a_token_are_those_of_its_matrices(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    architecture = read_architecture(make_model_dir(tmp_path / "model", case.architecture, **case.overrides))
    num_weights = 0
    for take in takes_of(architecture):
        _, _, layer, *rest = f"{take.name}...".split(".")
        if len(take.shape) == 2 and take.name.startswith("model.layers.") and rest[:2] != ["mlp", "gate"]:
            mixture = architecture.mixtures[int(layer)]
            chosen = 1.0
            if mixture is not None and "experts" in rest:
                chosen = mixture.num_chosen / mixture.num_experts
            num_weights += round(prod(take.shape) * chosen)
    assert architecture.weights_per_token == pytest.approx(num_weights, rel=1e-4)
