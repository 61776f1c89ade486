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
LARGE = {"Llama-3.1-8B": LLAMA_3_1_8B, "Qwen3-8B": QWEN3_8B}
DRY = {"tiny": TINY}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """A folder that `load_format: dummy` can load."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The least bytes and operations that a token needs, to compare with."""

    num_parameters: int
    """Parameters of all matrix products and norms. The embedding table does not count, since a token reads
    one row of it."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, a: ModelArchitecture) -> "ModelCosts":
        heads = (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim * a.hidden_size
        layer = heads + 3 * a.hidden_size * a.intermediate_size + 2 * a.hidden_size
        head_norms = 2 * a.head_dim if a.has_qk_norm else 0
        num_parameters = a.num_layers * (layer + head_norms) + a.hidden_size * (a.vocab_size + 1)
        return cls(num_parameters, a.num_layers, a.num_heads, a.num_kv_heads, a.head_dim)

    def decode_bytes(self, batch: int, context: int, weight_bytes: int, kv_bytes: int) -> int:
        """Bytes of a decode step.

        It reads every weight once, and every key and value of the contexts once.
        """
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * kv_bytes
        return self.num_parameters * weight_bytes + batch * context * per_token

    def prefill_flops(self, num_tokens: int, vocab_parameters: int) -> int:
        """Operations of a prefill.

        There are two operations for each weight and token (but only the last token's logits), and four for
        each pair of query and key and dimension.
        """
        pairs = num_tokens * (num_tokens + 1) // 2
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * pairs
        products = 2 * (self.num_parameters - vocab_parameters) * num_tokens + 2 * vocab_parameters
        return products + attention
