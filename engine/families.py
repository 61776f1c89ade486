"""Families of models: their names, transformers' default for each missing key, and the keys that are refused.

Imports no torch, since the command that starts a fleet also reads config.json files.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from baton.errors import ModelError


class Family(Enum):
    """A family, by the `model_type` of its config.json."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    MIXTRAL = "mixtral"
    MINIMAX_M2 = "minimax_m2"
    SMOLLM3 = "smollm3"
    GRANITE = "granite"
    PHI3 = "phi3"
    OLMO2 = "olmo2"
    OLMO3 = "olmo3"
    GLM4 = "glm4"
    GLM4_MOE = "glm4_moe"
    GLM4_MOE_LITE = "glm4_moe_lite"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3_text"
    GPT_OSS = "gpt_oss"
    DEEPSEEK_V2 = "deepseek_v2"
    DEEPSEEK_V3 = "deepseek_v3"

    @property
    def is_gemma(self) -> bool:
        """Whether norms multiply by 1 + weight, embeddings and attention scores have scales, soft caps are read,
        windows alternate with full layers, and the MLP's gate is a GELU."""
        return self in (Family.GEMMA2, Family.GEMMA3)

    @property
    def has_latent(self) -> bool:
        """Whether all heads share a latent."""
        return self in (Family.DEEPSEEK_V2, Family.DEEPSEEK_V3, Family.GLM4_MOE_LITE)

    @property
    def has_shared_experts(self) -> bool:
        """Whether all tokens use shared experts, in addition to those that each token chooses."""
        return self.has_latent or self is Family.GLM4_MOE


ARCHITECTURES = {
    "LlamaForCausalLM": Family.LLAMA,
    "MistralForCausalLM": Family.MISTRAL,
    "Qwen2ForCausalLM": Family.QWEN2,
    "Qwen3ForCausalLM": Family.QWEN3,
    "Qwen3MoeForCausalLM": Family.QWEN3_MOE,
    "MixtralForCausalLM": Family.MIXTRAL,
    "MiniMaxM2ForCausalLM": Family.MINIMAX_M2,
    "SmolLM3ForCausalLM": Family.SMOLLM3,
    "GraniteForCausalLM": Family.GRANITE,
    "Phi3ForCausalLM": Family.PHI3,
    "Olmo2ForCausalLM": Family.OLMO2,
    "Olmo3ForCausalLM": Family.OLMO3,
    "Glm4ForCausalLM": Family.GLM4,
    "Glm4MoeForCausalLM": Family.GLM4_MOE,
    "Glm4MoeLiteForCausalLM": Family.GLM4_MOE_LITE,
    "Gemma2ForCausalLM": Family.GEMMA2,
    "Gemma3ForCausalLM": Family.GEMMA3,
    "GptOssForCausalLM": Family.GPT_OSS,
    "DeepseekV2ForCausalLM": Family.DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": Family.DEEPSEEK_V3,
}
"""`architectures[0]` of a config.json -> its family."""

_GEMMA: dict[str, object] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_DEEPSEEK: dict[str, object] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_GLM4_MOE: dict[str, object] = {
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "topk_group": 1,
}
DEFAULTS: Mapping[Family, Mapping[str, Any]] = {
    Family.LLAMA: {},
    Family.MISTRAL: {"num_key_value_heads": 8, "sliding_window": 4096},
    Family.QWEN2: {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    Family.QWEN3: {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
    Family.QWEN3_MOE: {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    },
    Family.MIXTRAL: {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
    },
    Family.MINIMAX_M2: {
        "head_dim": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "rope_theta": 5_000_000.0,
    },
    Family.SMOLLM3: {
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
    Family.GRANITE: {},
    Family.PHI3: {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    Family.OLMO2: {"rms_norm_eps": 1e-5},
    Family.OLMO3: {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
    Family.GLM4: {
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    },
    Family.GLM4_MOE: {
        **_GLM4_MOE,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0,
    },
    Family.GLM4_MOE_LITE: {
        **_GLM4_MOE,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.8,
        "v_head_dim": 256,
    },
    Family.GEMMA2: {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    Family.GEMMA3: {
        **_GEMMA,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "sliding_window_pattern": 6,
    },
    Family.GPT_OSS: {
        "attention_bias": True,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    Family.DEEPSEEK_V2: {
        **_DEEPSEEK,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
    },
    Family.DEEPSEEK_V3: {
        **_DEEPSEEK,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
}
"""Values that transformers uses for keys that a config.json does not have."""

VALUES_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (),
    "decoder_sparse_step": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "first_k_dense_replace": (),
    "index_topk": (),
    "is_causal": (True,),
    "kv_lora_rank": (),
    "layer_types": ("full_attention",),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "mlp_layer_types": ("dense",),
    "mlp_only_layers": (),
    "moe_intermediate_size": (),
    "moe_layer_freq": (1,),
    "n_group": (1,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "no_rope_layer_interval": (),
    "no_rope_layers": (1,),
    "norm_topk_prob": (True,),
    "num_experts": (0,),
    "num_experts_per_tok": (0,),
    "num_local_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "num_shared_experts": (0,),
    "partial_rotary_factor": (1.0,),
    "q_lora_rank": (),
    "qk_layernorm": (False,),
    "qk_nope_head_dim": (),
    "qk_rope_head_dim": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "rope_interleave": (),
    "rope_local_base_freq": (),
    "rotary_dim": (),
    "rotary_pct": (1.0,),
    "routed_scaling_factor": (1.0,),
    "scoring_func": ("softmax",),
    "shared_expert_intermediate_size": (0,),
    "shared_intermediate_size": (0,),
    "sliding_window": (),
    "sliding_window_pattern": (),
    "swiglu_alpha": (),
    "swiglu_limit": (),
    "topk_group": (1,),
    "topk_method": ("greedy",),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
    "v_head_dim": (),
}
"""Keys that change what a model computes. With the listed values, or null, they change nothing. If a value is
a list, this applies to its elements."""

_EXPERTS = frozenset({"num_experts", "num_local_experts", "num_experts_per_tok"})
_SHARED_EXPERTS = frozenset(
    {
        "first_k_dense_replace",
        "moe_intermediate_size",
        "moe_layer_freq",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "scoring_func",
        "topk_group",
        "topk_method",
    }
)
_LATENT = frozenset({"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"})
_GUESSING_LAYERS = frozenset({"num_nextn_predict_layers"})
_WINDOWS_ON_SOME = frozenset({"use_sliding_window", "sliding_window", "layer_types"})
KEYS_READ: Mapping[Family, frozenset[str]] = {
    Family.LLAMA: frozenset(),
    Family.MISTRAL: frozenset({"layer_types", "sliding_window"}),
    Family.QWEN2: _WINDOWS_ON_SOME,
    Family.QWEN3: _WINDOWS_ON_SOME | {"use_qk_norm"},
    Family.QWEN3_MOE: _EXPERTS
    | {
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "sliding_window",
        "use_qk_norm",
        "use_sliding_window",
    },
    Family.MIXTRAL: _EXPERTS | {"sliding_window"},
    Family.MINIMAX_M2: _EXPERTS | {"partial_rotary_factor", "rotary_dim", "scoring_func", "use_qk_norm"},
    Family.SMOLLM3: _WINDOWS_ON_SOME | {"no_rope_layers", "no_rope_layer_interval"},
    Family.GRANITE: frozenset(
        {"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}
    ),
    Family.PHI3: frozenset({"partial_rotary_factor", "sliding_window"}),
    Family.OLMO2: frozenset(),
    Family.OLMO3: frozenset({"layer_types", "sliding_window"}),
    Family.GLM4: frozenset({"partial_rotary_factor"}),
    Family.GLM4_MOE: _SHARED_EXPERTS | _GUESSING_LAYERS | {"partial_rotary_factor", "use_qk_norm"},
    Family.GLM4_MOE_LITE: _SHARED_EXPERTS
    | _LATENT
    | _GUESSING_LAYERS
    | {"mlp_layer_types", "rope_interleave"},
    Family.GEMMA2: frozenset(
        {
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "layer_types",
            "query_pre_attn_scalar",
            "sliding_window",
        }
    ),
    Family.GEMMA3: frozenset(
        {
            "final_logit_softcapping",
            "layer_types",
            "query_pre_attn_scalar",
            "rope_local_base_freq",
            "sliding_window",
            "sliding_window_pattern",
        }
    ),
    Family.GPT_OSS: _EXPERTS | {"layer_types", "sliding_window", "swiglu_alpha", "swiglu_limit"},
    Family.DEEPSEEK_V2: _SHARED_EXPERTS | _LATENT,
    Family.DEEPSEEK_V3: _SHARED_EXPERTS | _LATENT | _GUESSING_LAYERS | {"rope_interleave"},
}
"""The keys of `VALUES_WITHOUT_EFFECT` that a family reads. All other keys of that table are refused if they would
have an effect."""

_SILU = ("silu", "swish")
_GELU = ("gelu_pytorch_tanh",)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family by `architectures`, else by `model_type`; ModelError names the supported architectures."""
    names = config.get("architectures") or [None]
    if not isinstance(names, list):
        raise ModelError(f"architectures must be a list of names, got {names!r:.80}")
    name, model_type = names[0], config.get("model_type")
    for architecture, family in ARCHITECTURES.items():
        if name == architecture or (name is None and model_type == family.value):
            return family
    raise ModelError(
        f"architecture {name or model_type!r:.80} is not supported; supported are {', '.join(ARCHITECTURES)}"
    )


def refused_keys(family: Family) -> list[str]:
    """Keys that may only have values without effect in a config.json of this family."""
    return sorted(VALUES_WITHOUT_EFFECT.keys() - KEYS_READ[family])


def refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    """Refuses keys that change what a model computes, if the family's decoder does not support them.

    Families call the activation `hidden_act` or `hidden_activation`. If other keys seem to name an
    activation, they must name a supported one, too. Numbers and truth values, such as that of
    `activation_dropout`, name no activation.
    """
    for key in refused_keys(family):
        if key == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        if not is_without_effect(config.get(key), VALUES_WITHOUT_EFFECT[key]):
            raise ModelError(f"{key} {config[key]!r:.80} is not supported for model_type {family.value!r}")
    supported = _GELU if family.is_gemma else _SILU
    for key, value in config.items():
        names_activation = {"act", "activation"} & set(key.split("_"))
        if names_activation and value and not isinstance(value, int | float) and value not in supported:
            raise ModelError(f"{key} {value!r} is not supported; only {supported[0]!r} is")


def is_without_effect(value: object, harmless: tuple[object, ...]) -> bool:
    """Whether a value is null or one of `harmless`. For a list: whether each element is one of `harmless`."""
    if isinstance(value, list):
        return all(each in harmless for each in value)
    return value is None or value in harmless
