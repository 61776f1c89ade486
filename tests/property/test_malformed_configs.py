"""A wrong value under any key of a config.json is refused by a ModelError, or gives a model that can be computed."""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from baton.errors import ModelError
from engine.eos_tokens import read_eos_token_ids
from engine.families import ARCHITECTURES, VALUES_WITHOUT_EFFECT
from engine.layers.rope import rope_frequencies
from engine.model_config import read_architecture
from engine.quantization_config import check_kv_cache_scheme
from tests.factories.families import CASES, Case
from tests.factories.quantized_checkpoints import KINDS

WRONG: tuple[Any, ...] = (
    None,
    "x",
    -1,
    0,
    1,
    1.5,
    10**400,
    float("nan"),
    float("inf"),
    [],
    [1],
    {},
    {"a": 1},
    True,
    [[1]],
    [{}],
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "head_dim": 16,
}
ROTATIONS: tuple[dict[str, Any], ...] = (
    {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
    {"rope_type": "linear", "type": "linear", "factor": 2.0},
)
KEYS_OF_ROTATIONS = ("rope_theta", "beta_fast", "beta_slow", "partial_rotary_factor", "attention_factor")
KEYS = ("rope_scaling", "rope_theta", "attention_bias", "eos_token_id", "quantization_config", "torch_dtype")


def config_of(case: Case) -> dict[str, Any]:
    (architecture,) = [name for name, family in ARCHITECTURES.items() if family is case.family]
    values = AutoConfig.for_model(case.architecture, **SIZES | case.overrides).to_json_string(use_diff=False)
    return {**json.loads(values), "architectures": [architecture]}


def check(path: Path, config: Mapping[str, Any]) -> bool:
    """Whether the configuration is accepted."""
    (path / "config.json").write_text(json.dumps(config))
    try:
        architecture = read_architecture(path)
        check_kv_cache_scheme(config)
        read_eos_token_ids(path)
    except ModelError:
        return False
    for rope in set(architecture.ropes) - {None}:
        assert rope is not None
        frequencies, scale = rope_frequencies(rope, rope.rotary_dim or 16)
        assert torch.isfinite(frequencies).all(), rope
        assert scale > 0, rope
    return True


def places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key of nested objects."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from places(inner, (*path, key))


def replaced(config: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    whole = inner = copy.deepcopy(config)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return whole


@pytest.mark.parametrize(
    "name",
    [
        "granite",
        "smollm3",
        "phi3",
        pytest.param("olmo3", marks=pytest.mark.by_hand),  # like "gemma3" and "phi3"
        "gemma3",
        "gpt oss",
        "deepseek v3",
        "qwen3 moe",
        pytest.param("minimax m2", marks=pytest.mark.by_hand),  # like "glm4 moe" and "qwen3 moe"
        "glm4 moe",
        pytest.param("glm4 moe lite", marks=pytest.mark.by_hand),  # like "deepseek v3"
    ],
)
def test_wrong_values_under_every_key(tmp_path: Path, name: str) -> None:
    config = config_of(CASES[name])
    assert check(tmp_path, config)
    for path in {*places(config), *((key,) for key in (*KEYS, *VALUES_WITHOUT_EFFECT))}:
        for value in WRONG:
            check(tmp_path, replaced(config, path, value))


@pytest.mark.parametrize("architecture", ["llama", "phi3", "deepseek_v3", "gemma3_text"])
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_wrong_values_in_a_rotation(tmp_path: Path, architecture: str, place: str) -> None:
    config = json.loads(AutoConfig.for_model(architecture, **SIZES).to_json_string(use_diff=False))
    config = {**config, "num_key_value_heads": 4, "rope_parameters": None}
    assert check(tmp_path, config)
    for rotation in ROTATIONS:
        for key in {*rotation, *KEYS_OF_ROTATIONS, "original_max_position_embeddings"}:
            for value in WRONG:
                changed = {**rotation, key: value}
                is_by_kind = architecture == "gemma3_text" and place == "rope_parameters"
                check(tmp_path, {**config, place: {"full_attention": changed} if is_by_kind else changed})


@pytest.mark.parametrize("name", KINDS)
def test_wrong_values_in_a_quantization(tmp_path: Path, name: str) -> None:
    config = json.loads(AutoConfig.for_model("llama", **SIZES).to_json_string(use_diff=False))
    quantization = json.loads(json.dumps(KINDS[name].config))
    assert check(tmp_path, {**config, "quantization_config": quantization})
    for path in places(quantization):
        for value in WRONG:
            check(tmp_path, {**config, "quantization_config": replaced(quantization, path, value)})
