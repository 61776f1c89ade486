"""Models with weights in 8-bit floats, on a CPU: transformers' tokens and logits with the same rounded weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import ModelConfig
from baton.sampling import MAX_LOGPROBS, SamplingParams
from engine.loading.gguf_folder import describe
from engine.loading.loader import LoadedModel, load_model
from tests.factories.gguf_files import make_gguf, transformers_model
from tests.factories.models import make_model_dir
from tests.factories.stepping import StepDriver

NUM_TOKENS = 8
PROMPTS = {str(length): [(11 * i + length) % 300 for i in range(length)] for length in (1, 4, 17, 70)}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, biased, odd heads": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}


def load(path: Path, dtype: str = "float32") -> LoadedModel:
    config = ModelConfig.model_validate({"dtype": dtype, "quantization": "fp8"})
    return load_model(config, path, torch.device("cpu"))


def reference_of(path: Path) -> Any:
    """transformers' model in float32 with every projection of the layers rounded: a row's largest value becomes 448."""
    model = transformers_model(path)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            scale = parameter.data.abs().amax(-1, keepdim=True) / 448
            parameter.data = (parameter.data / scale).to(torch.float8_e4m3fn).float() * scale
    return model


def check(model: LoadedModel, reference: Any, tolerance: float) -> None:
    """All prompts at once, in chunks of 7, mixed with each other's decodes."""
    driver = StepDriver(model)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=MAX_LOGPROBS)
    requests = [driver.add(name, prompt, params) for name, prompt in PROMPTS.items()]
    while running := [request for request in requests if len(request.outputs) < NUM_TOKENS]:
        driver.step({each.request_id: min(7, each.num_tokens - each.num_computed) for each in running})
    for request in requests:
        tokens = torch.tensor([[*request.prompt, *request.outputs]])
        with torch.inference_mode():
            expected = reference(tokens).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
        for position, logprobs in enumerate(request.logprobs):
            token_ids, found = zip(*logprobs.top, strict=True)
            torch.testing.assert_close(
                torch.tensor(found), expected[position, list(token_ids)], rtol=0, atol=tolerance
            )
        if tolerance < 1e-3:
            assert request.outputs == expected.argmax(-1).tolist()


@pytest.mark.parametrize("kernels", ["ours", "torch's"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logits_are_those_of_the_rounded_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kernels: str
) -> None:
    if kernels == "torch's":
        monkeypatch.setattr("engine.loading.loader.native_library", lambda: None)
    architecture, overrides = MODELS[name]
    path = make_model_dir(tmp_path, architecture, **overrides)
    check(load(path), reference_of(path), 2e-4)


def test_in_bfloat16_they_stay_close(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, dtype="bfloat16")
    check(load(path, "bfloat16"), reference_of(path), 0.5)


def test_a_gguf_files_numbers_are_rounded_too(tmp_path: Path) -> None:
    gguf, folder = tmp_path / "model.gguf", tmp_path / "folder"
    describe(make_gguf(gguf, make_model_dir(tmp_path / "source"), "Q8_0"), folder)
    (folder / "model.gguf").symlink_to(gguf)
    check(load(folder), reference_of(folder), 2e-4)


def test_the_reference_is_not_the_model_without_rounding(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path)
    with pytest.raises(AssertionError, match="not close"):
        check(load(path), transformers_model(path), 2e-4)
