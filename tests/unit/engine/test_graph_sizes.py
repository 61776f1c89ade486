"""Which steps are recorded as CUDA graphs: all sizes of decodes, and mixed steps up to a size that depends on the
model."""

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.gpu.shapes import LLAMA_3_1_8B, QWEN3_8B, QWEN3_30B_A3B, write_config
from engine.gpu.graphs import decode_sizes, mixed_sizes
from engine.model_config import read_architecture

QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize("max_tokens", [8, 16, 100, 512, 8192])
def test_sizes_of_recorded_steps_cover_what_steps_there_are(max_tokens: int, tmp_path: Path) -> None:
    for config, num_ranks, largest in (
        (LLAMA_3_1_8B, 1, 512),
        (LLAMA_3_1_8B, 4, 2048),
        (QWEN3_30B_A3B, 1, 2048),
        ({**QWEN3_8B, **QWEN3_4B}, 1, 1280),
        (DEEPSEEK_V2_LITE, 1, 1536),
    ):
        architecture = read_architecture(write_config(tmp_path, config))
        mixed = mixed_sizes(max_tokens, architecture, num_ranks)
        assert mixed == sorted(set(mixed))
        assert max(mixed) == min(max_tokens, largest)
    decodes = decode_sizes(max_tokens)
    assert decodes == sorted(set(decodes))
    assert decodes[-1] == max_tokens
    assert all(b - a <= max(8, b // 8) for a, b in pairwise(decodes))
