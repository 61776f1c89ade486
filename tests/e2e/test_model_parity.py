"""Greedy tokens and logits equal transformers' own, for every architecture and option that is served."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.test_families import check_batch, check_bfloat16
from tests.e2e.test_same_tokens import reference
from tests.factories.models import make_model_dir
from tests.factories.stepping import StepDriver, load_on_cpu

NUM_TOKENS = 16
PROMPT_LENGTHS = (1, 3, 4, 5, 15, 16, 17, 33, 70)


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 16.0, "original_max_position_embeddings": 64}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, biased, odd heads": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, as many kv heads": ("llama", {"num_key_value_heads": 4}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "mistral, window on some layers": (
        "mistral",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2, window on some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, biased, tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
    "rope linear": ("llama", rope(rope_type="linear", factor=2.5)),
    "rope dynamic": ("llama", rope(rope_type="dynamic", factor=4.0)),
    "rope llama3": ("llama", rope(rope_type="llama3", **LLAMA3)),
    "rope yarn": ("llama", rope(rope_type="yarn", **YARN)),
    "rope yarn, tempered": (
        "llama",
        rope(rope_type="yarn", mscale=0.7, mscale_all_dim=1.0, beta_fast=16.0, truncate=False, **YARN),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    architecture, overrides = MODELS[name]
    path = make_model_dir(tmp_path, architecture, **overrides)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompts = {
        str(length): torch.randint(300, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS
    }
    check_batch(load_on_cpu(path), theirs, prompts, NUM_TOKENS)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_generate_gives_the_same_tokens(tmp_path: Path, architecture: str) -> None:
    """transformers decoding with its own cache, token by token."""
    path = make_model_dir(tmp_path, architecture)
    prompts = {str(length): [(11 * i) % 300 for i in range(length)] for length in PROMPT_LENGTHS}
    ours = StepDriver(load_on_cpu(path), block_size=16).generate(prompts, NUM_TOKENS)
    assert list(map(tuple, ours.values())) == reference(path, list(prompts.values()), NUM_TOKENS)


def test_bfloat16_stays_close_to_transformers(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, dtype="bfloat16")
    check_bfloat16(path, [(13 * i) % 300 for i in range(150)], 60)
