"""The part of config.json that differs by family: a family's own keys, and what llama.cpp has in its code."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from baton.errors import ModelError
from engine.loading.gguf import GgufFile
from engine.loading.gguf_keys import floats_in, positive_in, size_in
from engine.mixture_config import MAX_EXPERTS

Config = dict[str, Any]
"""The content of a config.json."""
GEMMA2_PATTERN, GEMMA3_PATTERN = 2, 6
"""Every second layer of Gemma 2, and every sixth layer of Gemma 3, has no window. Files do not contain these numbers;
llama.cpp has them in its code, too."""
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
GPT_OSS_PATTERN = 2
"""Every second layer has no window."""
ROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""LongRoPE's divisors: the key of config.json -> the tensor."""
SIGMOID = 2
"""The value of `expert_gating_func` for experts whose scores are sigmoids."""
SMOLLM3_PATTERN = 4
"""Every fourth layer does not rotate; llama.cpp has this number in its code, too."""
OLMO3_PATTERN = 4
"""Every fourth layer has no window, if the file does not say which; llama.cpp has this number in its code, too."""
PHI3_4K_WINDOW = 2047
"""The window of the Phi-3 models with 4,096 positions; their files of early 2024 lack this number."""


def completed(file: GgufFile, name: str, config: Config) -> Config:
    """The config with the keys of this architecture's family."""
    of_family = _OF_FAMILY.get(name)
    return config if of_family is None else of_family(file, config)


def _gemma2(file: GgufFile, config: Config) -> Config:
    """If the file has no keys for the window and the caps, they get the values of all published models, as in
    llama.cpp."""
    _check_pattern(file, "gemma2", GEMMA2_PATTERN)
    base = config["rope_parameters"]["rope_theta"]
    if (key := "gemma2.rope.freq_base_swa") in file.metadata and positive_in(file, key) != base:
        raise ModelError(
            f"{file.path}: {key} ({file.metadata[key]}) must equal gemma2.rope.freq_base ({base})"
        )
    return _gemma(config, is_27b=config["num_hidden_layers"] == GEMMA2_27B_LAYERS) | {
        "attn_logit_softcapping": positive_in(file, "gemma2.attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": positive_in(file, "gemma2.final_logit_softcapping", default=30.0),
        "sliding_window": size_in(file, "gemma2.attention.sliding_window", default=4096),
    }


def _gemma3(file: GgufFile, config: Config) -> Config:
    """Adds the pattern of windows and the divisor of scores, which files lack."""
    _check_pattern(file, "gemma3", GEMMA3_PATTERN)
    local_base = positive_in(file, "gemma3.rope.freq_base_swa", default=10_000.0)
    return _gemma(config, is_27b=config["num_hidden_layers"] == GEMMA3_27B_LAYERS) | {
        "final_logit_softcapping": file.get("gemma3.final_logit_softcapping", float),
        "sliding_window": size_in(file, "gemma3.attention.sliding_window"),
        "sliding_window_pattern": GEMMA3_PATTERN,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
        },
    }


def _check_pattern(file: GgufFile, name: str, every: int) -> None:
    key = f"{name}.attention.sliding_window_pattern"
    if (pattern := file.metadata.get(key)) not in (None, every):
        raise ModelError(f"{file.path}: {key} ({pattern!r:.80}) is not supported")


def _gemma(config: Config, *, is_27b: bool) -> Config:
    """Adds `query_pre_attn_scalar`: in the largest models, the hidden size divided by the number of heads; in all other
    models, the head dimension."""
    del config["hidden_act"]
    by_width: int = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": by_width if is_27b else config["head_dim"],
    }


def _qwen3_moe(file: GgufFile, config: Config) -> Config:
    return config | {
        "num_experts": size_in(file, "qwen3moe.expert_count", most=MAX_EXPERTS),
        "num_experts_per_tok": size_in(file, "qwen3moe.expert_used_count"),
        "moe_intermediate_size": size_in(file, "qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp has it in its code
    }


def _llama(file: GgufFile, config: Config) -> Config:
    """A file of architecture `llama` with experts is Mixtral."""
    if config["architectures"] != ["MixtralForCausalLM"]:
        return config
    return config | {
        "num_local_experts": size_in(file, "llama.expert_count", most=MAX_EXPERTS),
        "num_experts_per_tok": size_in(file, "llama.expert_used_count"),
    }


def _gpt_oss(file: GgufFile, config: Config) -> Config:
    """Files do not contain the numbers of the activation; llama.cpp has them in its code, too.

    llama.cpp rounds YaRN's bounds to whole dimensions, but the model was made without this (`truncate`).
    """
    rope = config["rope_parameters"]
    supported = {
        "attention.sliding_window_pattern": GPT_OSS_PATTERN,
        "rope.freq_base_swa": rope["rope_theta"],
    }
    for key, only in supported.items():
        if (value := file.metadata.get(f"gpt-oss.{key}")) not in (None, only):
            raise ModelError(f"{file.path}: gpt-oss.{key} ({value!r:.80}) is not supported; only {only} is")
    return config | {
        "num_experts": size_in(file, "gpt-oss.expert_count", most=MAX_EXPERTS),
        "num_experts_per_tok": size_in(file, "gpt-oss.expert_used_count"),
        "sliding_window": size_in(file, "gpt-oss.attention.sliding_window"),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


def _olmo2(file: GgufFile, config: Config) -> Config:
    """A file with windows is OLMo 3. Only its layers without a window scale their rotation."""
    full = config["rope_parameters"]
    # Converters write `attention_factor` to the first key; newer ones to the second.
    keys = ("olmo2.rope.scaling.attn_factor", "olmo2.rope.scaling.yarn_attn_factor")
    factors = {factor: key for key in keys if (factor := positive_in(file, key, default=1.0)) != 1.0}
    if len(factors) > 1:
        raise ModelError(f"{file.path}: {' and '.join(keys)} must be equal; got {[*factors]}")
    for factor, key in factors.items():
        if full["rope_type"] != "yarn":
            raise ModelError(f"{file.path}: {key} ({factor}) is not supported without YaRN")
        full = full | {"attention_factor": factor}
    if "sliding_window" not in config:
        return config | {"rope_parameters": full}
    key, num_layers = "olmo2.attention.sliding_window_pattern", config["num_hidden_layers"]
    pattern = file.metadata.get(key, OLMO3_PATTERN)
    if pattern == OLMO3_PATTERN:
        pattern = [(layer + 1) % OLMO3_PATTERN for layer in range(num_layers)]
    if not isinstance(pattern, list) or len(pattern) != num_layers:
        raise ModelError(
            f"{file.path}: {key} ({pattern!r:.80}) must have a value for each of {num_layers} layers"
        )
    base = positive_in(file, "olmo2.rope.freq_base_swa", default=full["rope_theta"])
    return config | {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in pattern],
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        },
    }


def _phi3(file: GgufFile, config: Config) -> Config:
    """Keeps the sliding window, as transformers does. llama.cpp has switched it off."""
    length = config["max_position_embeddings"]
    if "phi3.attention.sliding_window" not in file.metadata and length == 4096:
        config["sliding_window"] = PHI3_4K_WINDOW
    return config | {
        "original_max_position_embeddings": size_in(
            file, "phi3.rope.scaling.original_context_length", default=length, most=2**30
        ),
        "rope_parameters": _phi3_rope(file, config["rope_parameters"])
        | _rotated_part(file, "phi3", config["head_dim"]),
    }


def _phi3_rope(file: GgufFile, plain: Config) -> Config:
    """LongRoPE if the file has its divisors. The file also has the factor that follows from the longer context."""
    attention_factor = positive_in(file, "phi3.rope.scaling.attn_factor", default=1.0)
    if plain["rope_type"] != "default":
        raise ModelError(f"{file.path}: a rotation of type {plain['rope_type']!r} is not supported for phi3")
    missing = [name for name in ROPE_FACTORS.values() if name not in file.tensors]
    is_named = file.get("phi3.rope.scaling.type", str) == "longrope"
    if len(missing) == len(ROPE_FACTORS) and not is_named:
        if attention_factor != 1.0:
            raise ModelError(
                f"{file.path}: phi3.rope.scaling.attn_factor ({attention_factor}) is not supported without "
                f"{', '.join(missing)}"
            )
        return plain
    if missing:
        raise ModelError(f"{file.path}: tensor {missing[0]} is missing")
    divisors = {key: list(floats_in(file, name)) for key, name in ROPE_FACTORS.items()}
    for key, name in ROPE_FACTORS.items():
        if not all(0.0 < divisor < 1e30 for divisor in divisors[key]):
            raise ModelError(f"{file.path}: the values of {name} must be positive numbers")
    return plain | divisors | {"rope_type": "longrope", "attention_factor": attention_factor}


def _rotated_part(file: GgufFile, name: str, head_dim: int) -> Config:
    """The share of a head's numbers that is rotated, for config.json. If the file lacks the key, all numbers are
    rotated, as in llama.cpp."""
    key = f"{name}.rope.dimension_count"
    dim = size_in(file, key, default=head_dim, most=head_dim)
    if dim % 2:
        raise ModelError(f"{file.path}: {key} must be even, got {dim}")
    share = dim / head_dim
    return {"partial_rotary_factor": share if int(head_dim * share) == dim else math.nextafter(share, 1.0)}


def _glm4(file: GgufFile, config: Config) -> Config:
    """q and k are in the order of Hugging Face, except in files of models that read images, which are not
    supported."""
    if (value := file.metadata.get(key := "glm4.rope.dimension_sections")) not in (None, [0] * 4):
        raise ModelError(f"{file.path}: {key} ({value!r:.80}) is not supported")
    rope = config["rope_parameters"] | _rotated_part(file, "glm4", config["head_dim"])
    return config | {"rope_parameters": rope}


def _glm4_moe(file: GgufFile, config: Config) -> Config:
    """The last layers of the file may be those that guess further tokens."""
    _check_sigmoid(file, "glm4moe")
    num_guessing = file.get(key := "glm4moe.nextn_predict_layers", int) or 0
    num_layers = config["num_hidden_layers"] - num_guessing
    if num_guessing < 0 or num_layers < 1:
        raise ModelError(f"{file.path}: {key} ({num_guessing}) must be less than glm4moe.block_count")
    scale = file.get("glm4moe.expert_weights_scale", float)
    rope = config["rope_parameters"] | _rotated_part(file, "glm4moe", config["head_dim"])
    return config | {
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": num_guessing,
        "n_routed_experts": size_in(file, "glm4moe.expert_count", most=MAX_EXPERTS),
        "num_experts_per_tok": size_in(file, "glm4moe.expert_used_count"),
        "moe_intermediate_size": size_in(file, "glm4moe.expert_feed_forward_length"),
        "n_shared_experts": size_in(file, "glm4moe.expert_shared_count"),
        "first_k_dense_replace": file.get("glm4moe.leading_dense_block_count", int) or 0,
        "norm_topk_prob": file.get("glm4moe.expert_weights_norm", bool) or False,
        "routed_scaling_factor": scale or 1.0,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "rope_parameters": rope,
    }


def _minimax_m2(file: GgufFile, config: Config) -> Config:
    _check_sigmoid(file, "minimax-m2")
    rope = config["rope_parameters"] | _rotated_part(file, "minimax-m2", config["head_dim"])
    return config | {
        "num_local_experts": size_in(file, "minimax-m2.expert_count", most=MAX_EXPERTS),
        "num_experts_per_tok": size_in(file, "minimax-m2.expert_used_count"),
        "rope_parameters": rope,
    }


def _check_sigmoid(file: GgufFile, name: str) -> None:
    key = f"{name}.expert_gating_func"
    if (function := file.metadata.get(key, SIGMOID)) != SIGMOID:
        raise ModelError(
            f"{file.path}: {key} ({function!r:.80}) is not supported; only {SIGMOID} (sigmoid) is"
        )


def _smollm3(_: GgufFile, config: Config) -> Config:
    return config | {"no_rope_layer_interval": SMOLLM3_PATTERN}


def _granite(file: GgufFile, config: Config) -> Config:
    """As in llama.cpp, a scale of 0 is no scale, and only `logit_scale`, which divides logits, must be there."""
    key = "granite.rope.scaling.finetuned"
    if file.get(key, bool) is False:
        raise ModelError(f"{file.path}: {key} (False), a model without a rotation, is not supported")
    scales = {
        "attention_multiplier": ("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
    }
    found = {
        name: positive_in(file, key) if file.get(key := f"granite.{short}", float) else default
        for name, (short, default) in scales.items()
    }
    return config | found | {"logits_scaling": positive_in(file, "granite.logit_scale")}


_OF_FAMILY: Mapping[str, Callable[[GgufFile, Config], Config]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "llama": _llama,
    "minimax-m2": _minimax_m2,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen3moe": _qwen3_moe,
    "smollm3": _smollm3,
}
