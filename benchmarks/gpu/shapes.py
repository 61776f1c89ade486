"""Models of known shapes with dummy weights: folders that contain only a config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model_config import ModelArchitecture

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B: dict[str, Any] = {
    **QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
"""A mixture of experts: 30 billion parameters (61 GB), of which a token uses 3 billion."""
TINY: dict[str, Any] = {
    **QWEN3_8B,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 24,
    "max_position_embeddings": 256,
}
TINY_MIXTURE: dict[str, Any] = {
    **QWEN3_30B_A3B,
    **{key: TINY[key] for key in TINY if TINY[key] != QWEN3_8B[key]},
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LARGE = {"Llama-3.1-8B": LLAMA_3_1_8B, "Qwen3-8B": QWEN3_8B, "Qwen3-30B-A3B": QWEN3_30B_A3B}
DRY = {"tiny": TINY, "tiny mixture": TINY_MIXTURE}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """A folder that `load_format: dummy` can load."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def expected_experts(num_experts: int, num_chosen: int, num_tokens: int) -> float:
    """How many experts this many tokens use together, on average, if each token chooses at random."""
    return num_experts * (1.0 - (1.0 - num_chosen / num_experts) ** num_tokens)


def comparable(config: dict[str, Any]) -> dict[str, Any]:
    """The model with as many experts as a token chooses, so that no rounding decides which ones are chosen."""
    if "num_experts" not in config:
        return config
    return {**config, "num_experts": config["num_experts_per_tok"]}


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The least bytes and operations that a token needs, to compare with. Mixtures have no shared experts."""

    num_shared_parameters: int
    """Parameters of all matrix products and norms of layers that every token uses."""
    num_head_parameters: int
    """Parameters of the last norm and of the product with the vocabulary. The embedding table does not count,
    since a token reads one row of it."""
    num_expert_parameters: int
    """Parameters of one expert in all layers; 0 without mixtures."""
    num_experts: int
    num_chosen: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, a: ModelArchitecture) -> "ModelCosts":
        heads = (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim * a.hidden_size
        head_norms = 2 * a.head_dim if a.has_qk_norm else 0
        shared = a.num_layers * (heads + 2 * a.hidden_size + head_norms)
        expert, num_experts, num_chosen = 0, 0, 0
        for mixture in a.mixtures:
            if mixture is None:
                shared += 3 * a.hidden_size * a.intermediate_size
            else:
                shared += mixture.num_experts * a.hidden_size
                expert += 3 * a.hidden_size * mixture.intermediate_size
                num_experts, num_chosen = mixture.num_experts, mixture.num_chosen
        return cls(
            shared,
            a.hidden_size * (a.vocab_size + 1),
            expert,
            num_experts,
            num_chosen,
            a.num_layers,
            a.num_heads,
            a.num_kv_heads,
            a.head_dim,
        )

    def decode_bytes(self, batch: int, context: int, layer_bytes: int, head_bytes: int, kv_bytes: int) -> int:
        """Bytes of a decode step.

        The step reads every key and value of the contexts once. It also reads every weight once, except those of
        experts that no token uses.
        """
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * kv_bytes
        in_layers = self.num_shared_parameters
        if self.num_experts:
            num_used = expected_experts(self.num_experts, self.num_chosen, batch)
            in_layers += int(num_used * self.num_expert_parameters)
        weights = in_layers * layer_bytes + self.num_head_parameters * head_bytes
        return weights + batch * context * per_token

    def prefill_flops(self, num_tokens: int) -> int:
        """Operations of a prefill.

        There are two operations for each weight that a token uses (but only the last token's logits), and four for each
        dimension of each pair of a query and a key.
        """
        pairs = num_tokens * (num_tokens + 1) // 2
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * pairs
        used = self.num_shared_parameters + self.num_chosen * self.num_expert_parameters
        products = 2 * used * num_tokens + 2 * self.num_head_parameters
        return products + attention
