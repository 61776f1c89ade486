"""Greedy tokens and logits equal transformers' own, for every architecture and option that is served."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.sampling import MAX_LOGPROBS, SamplingParams
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
    """All prompts at once, in chunks of 7 and blocks of 4 in shuffled order, mixed with each other's decodes."""
    architecture, overrides = MODELS[name]
    path = make_model_dir(tmp_path, architecture, **overrides)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    driver = StepDriver(load_on_cpu(path))
    generator = torch.Generator().manual_seed(0)
    prompts = {
        str(length): torch.randint(300, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS
    }
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=MAX_LOGPROBS)
    requests = [driver.add(request_id, prompt, params) for request_id, prompt in prompts.items()]
    while running := [request for request in requests if len(request.outputs) < NUM_TOKENS]:
        driver.step(
            {request.request_id: min(7, request.num_tokens - request.num_computed) for request in running}
        )

    for request in requests:
        with torch.inference_mode():
            logits = reference(torch.tensor([[*request.prompt, *request.outputs]])).logits[
                0, len(request.prompt) - 1 : -1
            ]
        assert request.outputs == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1)
        for position, logprobs in enumerate(request.logprobs):
            token_ids = [token_id for token_id, _ in logprobs.top]
            values = torch.tensor([value for _, value in logprobs.top])
            torch.testing.assert_close(values, expected[position, token_ids], rtol=0, atol=2e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_generate_gives_the_same_tokens(tmp_path: Path, architecture: str) -> None:
    """transformers decoding with its own cache, token by token."""
    path = make_model_dir(tmp_path, architecture)
    reference: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    driver = StepDriver(load_on_cpu(path), block_size=16)
    prompts = {str(length): [(11 * i) % 300 for i in range(length)] for length in PROMPT_LENGTHS}
    ours = driver.generate(prompts, NUM_TOKENS)
    for name, prompt in prompts.items():
        input_ids = torch.tensor([prompt])
        theirs = reference.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
        )
        assert ours[name] == theirs[0, len(prompt) :].tolist()


def test_bfloat16_stays_close_to_transformers(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, dtype="bfloat16")
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    driver = StepDriver(load_on_cpu(path, dtype="bfloat16"))
    prompt = [(13 * i) % 300 for i in range(150)]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
    request = driver.add("a", prompt, params)
    while len(request.outputs) < 8:
        driver.step({"a": min(60, request.num_tokens - request.num_computed)})
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *request.outputs]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(request.outputs).unsqueeze(1)).squeeze(1)
    found = torch.tensor([logprobs.logprob for logprobs in request.logprobs])
    assert (found - expected).abs().max() < 0.25
