"""Tiny models of every family and option that Baton serves, and the tables of docs/models.md.

python -m tests.factories.families           rewrites the tables
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.families import ARCHITECTURES, KEYS_READ, VALUES_WITHOUT_EFFECT, Family
from engine.loading.gguf_folder import ARCHITECTURES as GGUF_ARCHITECTURES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@dataclass(frozen=True)
class Case:
    """A model, as arguments for `make_model_dir`."""

    family: Family
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return self.family.value


def longrope(short: float, long: float, **parameters: Any) -> dict[str, Any]:
    """Parameters for heads of 16 dimensions. The first frequency keeps its own divisor."""
    divisors = {"short_factor": [1.0] + [short] * 7, "long_factor": [1.0] + [long] * 7}
    return {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **divisors, **parameters}}


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9}
GRANITE = {
    "attention_multiplier": 0.1,
    "embedding_multiplier": 6.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.3,
}
GPT_OSS = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 64,
    "sliding_window": 9,
    "swiglu_limit": 1.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
}
QWEN3_MOE: dict[str, Any] = {
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "q_lora_rank": 40,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
"""A multiple of 16 numbers in the cache, as our own CPU kernels require."""
MINIMAX_M2 = {
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "rotary_dim": 8,
}
GLM4_MOE = {
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK_V3 = {**DEEPSEEK, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
CASES: dict[str, Case] = {
    "deepseek v3": Case(Family.DEEPSEEK_V3, DEEPSEEK_V3),
    "deepseek v3, yarn, whole queries": Case(
        Family.DEEPSEEK_V3,
        {
            **DEEPSEEK_V3,
            "q_lora_rank": None,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek v3, one group, two shared, halves rotated": Case(
        Family.DEEPSEEK_V3,
        {
            **DEEPSEEK_V3,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek v3, a latent of odd size": Case(
        Family.DEEPSEEK_V3, {**DEEPSEEK_V3, "kv_lora_rank": 20, "first_k_dense_replace": 3}
    ),
    "deepseek v2": Case(
        Family.DEEPSEEK_V2,
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek v2, groups": Case(
        Family.DEEPSEEK_V2,
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
        },
    ),
    "qwen3 moe": Case(Family.QWEN3_MOE, QWEN3_MOE),
    "qwen3 moe, normalized, window, biased": Case(
        Family.QWEN3_MOE,
        {
            **QWEN3_MOE,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "attention_bias": True,
        },
    ),
    "qwen3 moe, every other layer": Case(Family.QWEN3_MOE, {**QWEN3_MOE, "decoder_sparse_step": 2}),
    "qwen3 moe, some layers dense": Case(Family.QWEN3_MOE, {**QWEN3_MOE, "mlp_only_layers": [0, 2]}),
    "mixtral": Case(Family.MIXTRAL, {"num_local_experts": 5}),
    "mixtral, one expert a token, window, tied": Case(
        Family.MIXTRAL,
        {
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "sliding_window": 9,
            "tie_word_embeddings": True,
        },
    ),
    "minimax m2": Case(Family.MINIMAX_M2, MINIMAX_M2),
    "minimax m2, all of a head rotated, tied": Case(
        Family.MINIMAX_M2, {**MINIMAX_M2, "rotary_dim": 16, "tie_word_embeddings": True}
    ),
    "olmo2": Case(Family.OLMO2),
    "olmo2, biased": Case(Family.OLMO2, {"attention_bias": True}),
    "olmo3": Case(
        Family.OLMO3,
        {
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmo3, another pattern, biased": Case(
        Family.OLMO3,
        {
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
        },
    ),
    "granite": Case(Family.GRANITE, GRANITE),
    "granite, tied, biased": Case(
        Family.GRANITE, {**GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "granite, tokens that ranks do not divide": Case(Family.GRANITE, {**GRANITE, "vocab_size": 303}),
    "smollm3": Case(Family.SMOLLM3, {"no_rope_layer_interval": 2}),
    "smollm3, windows where it does not rotate": Case(
        Family.SMOLLM3, {"no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 9}
    ),
    "phi3": Case(Family.PHI3),
    "phi3, window": Case(Family.PHI3, {"sliding_window": 9}),
    "phi3, partial": Case(
        Family.PHI3,
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.75}},
    ),
    "phi3, longrope, short": Case(
        Family.PHI3,
        {"original_max_position_embeddings": 1024, **longrope(1.5, 30.0)},
    ),
    "phi3, longrope, long": Case(
        Family.PHI3,
        {"original_max_position_embeddings": 4, **longrope(1.5, 30.0)},
    ),
    "glm4": Case(Family.GLM4, {"head_dim": 16}),
    "glm4, all of a head rotated": Case(
        Family.GLM4,
        {
            "head_dim": 16,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0},
        },
    ),
    "glm4 moe": Case(Family.GLM4_MOE, {**GLM4_MOE, "use_qk_norm": True, "attention_bias": True}),
    "glm4 moe, groups, two shared, all of a head rotated": Case(
        Family.GLM4_MOE,
        {
            **GLM4_MOE,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0},
        },
    ),
    "glm4 moe lite": Case(Family.GLM4_MOE_LITE, DEEPSEEK),
    "glm4 moe lite, another pattern, whole queries, halves rotated": Case(
        Family.GLM4_MOE_LITE,
        {
            **DEEPSEEK,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "q_lora_rank": None,
            "rope_interleave": False,
        },
    ),
    "gemma2": Case(Family.GEMMA2, {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2, uncapped": Case(
        Family.GEMMA2, {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    ),
    "gemma3": Case(
        Family.GEMMA3,
        {**GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma3, scaled, capped": Case(
        Family.GEMMA3,
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gpt oss": Case(Family.GPT_OSS, GPT_OSS),
    "gpt oss, without biases of attention, another gate, tied": Case(
        Family.GPT_OSS,
        {
            **GPT_OSS,
            "attention_bias": False,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.5,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
"""Cases in addition to those of tests/e2e/test_model_parity.py."""

NAMES = {
    Family.LLAMA: ("Llama 2 and 3, SmolLM2", ""),
    Family.MISTRAL: ("Mistral", "a window on every layer, or on some"),
    Family.QWEN2: ("Qwen2, Qwen2.5", "windows on some layers"),
    Family.QWEN3: ("Qwen3, dense", "norms of heads; windows on some layers"),
    Family.QWEN3_MOE: ("Qwen3, mixture of experts", "experts in all layers, or some"),
    Family.MIXTRAL: ("Mixtral", "experts in all layers; a window on every layer"),
    Family.MINIMAX_M2: (
        "MiniMax-M2, M2.1, M2.5",
        "norms of whole projections; a part of a head rotated; experts chosen with a bias",
    ),
    Family.SMOLLM3: ("SmolLM3", "layers that do not rotate"),
    Family.GRANITE: ("Granite 3, dense", "scales of embedding, branches, scores and logits"),
    Family.PHI3: ("Phi-3, Phi-3.5, Phi-4", "a part of a head rotated; LongRoPE; a window on every layer"),
    Family.OLMO2: ("OLMo 2", "norms of whole projections, and behind branches"),
    Family.OLMO3: ("OLMo 3", "the same; three of four layers with a window, and a rotation of their own"),
    Family.GLM4: (
        "GLM-4 (GLM-4-0414)",
        "half of a head rotated, in neighbouring pairs; norms behind branches",
    ),
    Family.GLM4_MOE: (
        "GLM-4.5, 4.5-Air, 4.6, 4.7",
        "half of a head rotated; experts chosen with a bias, and a shared one",
    ),
    Family.GLM4_MOE_LITE: ("GLM-4.7-Flash", "all heads share a latent; experts as in GLM-4.5"),
    Family.GEMMA2: ("Gemma 2", "every other layer with a window; soft caps"),
    Family.GEMMA3: ("Gemma 3, text", "five of six layers with a window, and a rotation of their own"),
    Family.GPT_OSS: (
        "gpt-oss",
        "experts in all layers; every other layer with a window; a sink for each head; MXFP4",
    ),
    Family.DEEPSEEK_V2: ("DeepSeek-V2, V2-Lite, V2.5", "all heads share a latent; shared experts"),
    Family.DEEPSEEK_V3: (
        "DeepSeek-V3, R1, V3.1",
        "the same; experts chosen by groups, with a bias",
    ),
}


def families_table() -> str:
    """The table of what each family may be served with."""
    in_gguf = {name: kind for kind, name in GGUF_ARCHITECTURES.items()}
    rows = [
        "| models | `architectures` | what is special | CPU | GPU | ranks | GGUF |",
        "|---|---|---|---|---|---|---|",
    ]
    for architecture, family in ARCHITECTURES.items():
        name, special = NAMES[family]
        kind = {Family.MISTRAL: "llama", Family.MIXTRAL: "llama", Family.OLMO3: "olmo2"}.get(
            family, in_gguf.get(architecture)
        )
        gguf = "no" if kind is None else f"`{kind}`"
        rows.append(f"| {name} | `{architecture}` | {special} | yes | yes | yes | {gguf} |")
    return "\n".join(rows)


def keys_table() -> str:
    """The table of what is refused, by its configuration key."""
    rows = ["| key | values without effect, besides null | read for |", "|---|---|---|"]
    for key, harmless in VALUES_WITHOUT_EFFECT.items():
        values = ", ".join(f"`{str(value).lower()}`" for value in harmless)
        readers = ", ".join(f"`{family.value}`" for family in Family if key in KEYS_READ[family])
        rows.append(f"| `{key}` | {values} | {readers} |")
    return "\n".join(rows)


def renewed(page: str) -> str:
    """The page with its tables rewritten."""
    for name, table in (("families", families_table()), ("keys", keys_table())):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        assert after, f"{PAGE} has no place for the table of {name}"
        page = f"{before}{begin}{table}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
