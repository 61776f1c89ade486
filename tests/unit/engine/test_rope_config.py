"""The rotation that a config.json describes is transformers', however the keys are spelled; else it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from baton.errors import ModelError
from engine.model_config import ModelArchitecture, read_architecture
from engine.rope_config import RopeType

BASE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
QWEN3 = BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
GEMMA3 = BASE | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention"],
}
OLMO3 = GEMMA3 | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
MINIMAX = BASE | {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def read(path: Path, config: dict[str, Any], **overrides: Any) -> ModelArchitecture:
    (path / "config.json").write_text(json.dumps(config | overrides))
    return read_architecture(path)


def theirs(path: Path) -> Any:
    return AutoConfig.from_pretrained(path).rope_parameters


@pytest.mark.parametrize("theta", [{"rope_theta": 5e5}, {}], ids=["a theta at the top", "none"])
def test_rope_scaling_replaces_rope_parameters(tmp_path: Path, theta: dict[str, Any]) -> None:
    """Model cards tell users to add it to a config.json, which transformers 5 may have saved."""
    saved = {"rope_type": "default", "rope_theta": theta.get("rope_theta", 1e4)}
    (rope, _) = read(tmp_path, QWEN3, **theta, rope_parameters=saved, rope_scaling=YARN).ropes
    assert rope is not None
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == (RopeType.YARN, 4.0, 256)
    assert rope.theta == saved["rope_theta"]
    assert theirs(tmp_path) == YARN | {"rope_theta": rope.theta}


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (YARN | {"factor": 8.0}, 2048),
        (YARN | {"factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0}, 1024),
        ({"rope_type": "linear", "factor": 8.0}, 1024),
        (None, 1024),
    ],
    ids=str,
)
def test_yarn_extends_the_model(tmp_path: Path, scaling: dict[str, Any] | None, positions: int) -> None:
    """Qwen's model cards tell users to add the scaling, and to leave `max_position_embeddings` as it is."""
    extended = read(tmp_path, QWEN3, max_position_embeddings=1024, rope_scaling=scaling)
    assert extended.max_position_embeddings == positions


def test_an_empty_rope_scaling_replaces_nothing(tmp_path: Path) -> None:
    saved = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    plain = read(tmp_path, QWEN3, rope_parameters=saved)
    empties: tuple[dict[str, Any] | None, ...] = ({}, None)
    for empty in empties:
        assert read(tmp_path, QWEN3, rope_parameters=saved, rope_scaling=empty) == plain


def test_rope_scaling_that_would_lose_the_model_s_base_is_refused(tmp_path: Path) -> None:
    """transformers then computes with 10,000."""
    saved = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(
        ModelError,
        match=r"rope_scaling would replace rope_parameters, whose rope_theta \(1000000\.0\) would be lost; m",
    ):
        read(tmp_path, QWEN3, rope_parameters=saved, rope_scaling=YARN)
    assert theirs(tmp_path)["rope_theta"] == 1e4
    (rope, _) = read(tmp_path, QWEN3, rope_parameters=saved, rope_scaling={**YARN, "rope_theta": 1e6}).ropes
    assert rope is not None
    assert rope.theta == theirs(tmp_path)["rope_theta"] == 1e6


def test_rope_scaling_replaces_single_keys_of_gemma_3_s_layers_without_a_window(tmp_path: Path) -> None:
    saved = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 123.0},
    }
    scaling = {"rope_type": "linear", "factor": 8.0}
    sliding, full = read(tmp_path, GEMMA3, rope_parameters=saved, rope_scaling=scaling).ropes
    assert sliding is not None
    assert full is not None
    assert (sliding.rope_type, sliding.theta) == (RopeType.DEFAULT, 123.0)
    assert (full.rope_type, full.factor, full.theta) == (RopeType.LINEAR, 8.0, 5e5)
    assert theirs(tmp_path) == saved | {"full_attention": {**scaling, "rope_theta": 5e5}}


def test_two_types_of_one_rotation_are_refused(tmp_path: Path) -> None:
    saved = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}
    with pytest.raises(
        ModelError, match=r"rope_type \('default'\) and type \('linear'\) of a rotation must be eq"
    ):
        read(tmp_path, GEMMA3, rope_parameters=saved, rope_scaling={"type": "linear", "factor": 8.0})


@pytest.mark.parametrize("config", [GEMMA3, OLMO3], ids=["gemma3", "olmo3"])
def test_the_old_name_of_a_type_is_refused_where_transformers_ignores_it(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    with pytest.raises(
        ModelError, match=r"rope_type \('default'\) and type \('linear'\) of a rotation must be eq"
    ):
        read(tmp_path, config, rope_scaling={"type": "linear", "factor": 8.0})
    assert theirs(tmp_path)["full_attention"]["rope_type"] == "default"


@pytest.mark.parametrize("config", [GEMMA3, OLMO3], ids=["gemma3", "olmo3"])
def test_the_original_length_beside_rotations_of_kinds_of_layers_has_no_effect(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """transformers does the same."""
    for scaling, original in ((YARN, 256), ({"rope_type": "yarn", "factor": 4.0}, 1024)):
        _, full = read(tmp_path, config, rope_scaling=scaling, original_max_position_embeddings=64).ropes
        assert full is not None
        assert full.original_max_position_embeddings == original
        assert theirs(tmp_path)["full_attention"]["original_max_position_embeddings"] == original


@pytest.mark.parametrize("config", [GEMMA3, OLMO3], ids=["gemma3", "olmo3"])
def test_truncate_of_rotations_by_kind_of_layer_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    """transformers ignores it."""
    plain = read(tmp_path, config, rope_scaling=YARN)
    assert read(tmp_path, config, rope_scaling=YARN | {"truncate": True}) == plain
    rotation = YARN | {"truncate": False}
    for given in ({"rope_scaling": rotation}, {"rope_parameters": {"sliding_attention": rotation}}):
        with pytest.raises(ModelError, match="truncate False of a rotation is not supported for '"):
            read(tmp_path, config, **given)


@pytest.mark.parametrize("config", [GEMMA3, OLMO3], ids=["gemma3", "olmo3"])
def test_yarn_does_not_extend_a_model_whose_other_layers_would_change(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """Beyond the model's own length, `dynamic` scaling would change with each token."""
    for other, positions in (("linear", 2048), ("dynamic", 1024)):
        rotations = {
            "full_attention": YARN | {"factor": 8.0},
            "sliding_attention": {"rope_type": other, "factor": 4.0},
        }
        assert read(tmp_path, config, rope_parameters=rotations).max_position_embeddings == positions


def test_a_base_of_olmo_3_that_its_windows_would_lose_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="rope_theta 10000 would be lost in layers with a window, for which tran"
    ):
        read(tmp_path, OLMO3, rope_theta=1e4)
    assert [theirs(tmp_path)[kind]["rope_theta"] for kind in OLMO3["layer_types"]] == [5e5, 1e4]
    kinds = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in OLMO3["layer_types"]}
    ropes = read(tmp_path, OLMO3, rope_theta=1e4, rope_parameters=kinds).ropes
    assert [rope.theta for rope in ropes if rope is not None] == [1e4, 1e4]
    assert theirs(tmp_path) == kinds


def test_yarn_s_turns_of_zero_mean_its_own(tmp_path: Path) -> None:
    """transformers does the same."""
    plain = read(tmp_path, QWEN3, rope_scaling=YARN)
    assert read(tmp_path, QWEN3, rope_scaling={**YARN, "beta_fast": 0, "beta_slow": 0.0}) == plain


@pytest.mark.parametrize(
    ("rotation", "message"),
    [
        ("linear", "rope_scaling must be an object, got 'linear'"),
        ({"rope_type": "linear", "factor": "4"}, "factor must be a positive number, got '4'"),
        ({"rope_type": "linear", "factor": 0}, "factor must be a positive number, got 0"),
        ({"rope_type": ["linear"]}, "rope type ['linear'] is not supported"),
        ({"rope_theta": "x"}, "rope_theta must be a positive number, got 'x'"),
        ({**YARN, "beta_fast": "x"}, "beta_fast must be a positive number, got 'x'"),
        ({**YARN, "attention_factor": []}, "attention_factor must be a positive number, got []"),
        ({**YARN, "truncate": "no"}, "truncate must be true or false, got 'no'"),
        (
            {**YARN, "factor": 1e7},
            "factor (1e+07) times original_max_position_embeddings (256) must be less than 2**31",
        ),
        ({**YARN, "rope_theta": 1.0}, "rope_theta of rope type 'yarn' must not be 1"),
        (
            {**YARN, "original_max_position_embeddings": 2.5},
            "original_max_position_embeddings must be a positive integer, got 2.5",
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "high_freq_factor (4) must be greater than low_freq_factor (4)",
        ),
    ],
)
def test_numbers_that_cannot_be_are_named(tmp_path: Path, rotation: object, message: str) -> None:
    with pytest.raises(ModelError) as raised:
        read(tmp_path, QWEN3, rope_scaling=rotation)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"rotary_dim": 4},
        {"rotary_dim": 4, "partial_rotary_factor": 0.5},
        {"rotary_dim": 4, "partial_rotary_factor": None},
        {"rotary_dim": 4, "rope_scaling": YARN},
        {"rotary_dim": 4, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    ],
    ids=str,
)
def test_minimax_rotates_as_much_of_a_head_as_in_transformers(
    tmp_path: Path, overrides: dict[str, Any]
) -> None:
    rope, _ = read(tmp_path, MINIMAX, **overrides).ropes
    assert rope is not None
    share = theirs(tmp_path).get("partial_rotary_factor", 1.0)
    assert (rope.rotary_dim or BASE["head_dim"]) == BASE["head_dim"] * share
