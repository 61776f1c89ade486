"""Small config.json files of every family, for tests that change a key of them."""

import json
from pathlib import Path
from typing import Any

from engine.families import ARCHITECTURES, Family
from engine.model_config import ModelArchitecture, read_architecture

BASE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
WITH_WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
LATENT = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
}
OF_FAMILY: dict[Family, dict[str, Any]] = {
    Family.QWEN2: WITH_WINDOWS,
    Family.QWEN3: WITH_WINDOWS,
    Family.QWEN3_MOE: {
        "use_sliding_window": True,
        "sliding_window": 9,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
    },
    Family.MINIMAX_M2: {"head_dim": 16, "num_experts_per_tok": 4},
    Family.GLM4_MOE: LATENT | {"num_key_value_heads": 2},
    Family.GLM4_MOE_LITE: LATENT,
    Family.SMOLLM3: WITH_WINDOWS | {"no_rope_layers": [1, 1, 0]},
    Family.OLMO3: {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    Family.GEMMA3: {"sliding_window_pattern": 3},
    Family.DEEPSEEK_V2: LATENT | {"topk_method": "group_limited_greedy"},
    Family.DEEPSEEK_V3: LATENT,
}


def read_config(path: Path, family: Family, **overrides: Any) -> ModelArchitecture:
    """Writes the family's config.json with these keys changed, and reads it."""
    (architecture,) = [name for name, each in ARCHITECTURES.items() if each is family]
    values = BASE | OF_FAMILY.get(family, {}) | {"architectures": [architecture]} | overrides
    (path / "config.json").write_text(json.dumps(values))
    return read_architecture(path)
