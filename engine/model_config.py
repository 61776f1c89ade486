"""ModelArchitecture: what a config.json says about the shape of a model; reads no weights and imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from baton.errors import ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""`architectures[0]` of a config.json -> `model_type`. All four are one decoder with different options."""


class RopeType(Enum):
    """How rotary frequencies are stretched beyond the length a model was pretrained on."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; fields that a type does not use keep their defaults."""

    rope_type: RopeType = RopeType.DEFAULT
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitecture:
    """A decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention, gated SiLU MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many tokens a token sees, itself included; None means all."""
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool


def read_architecture(path: Path) -> ModelArchitecture:
    """Reads `path/config.json`; ModelError names what is missing, or is unsupported and would change results."""
    config = read_json(path / "config.json")
    try:
        return _architecture(config)
    except ModelError as error:
        raise ModelError(f"{path / 'config.json'}: {error}") from None


def read_eos_token_ids(path: Path) -> tuple[int, ...]:
    """End-of-sequence tokens: generation_config.json's where it has any, else config.json's, else none."""
    for name in ("generation_config.json", "config.json"):
        if not (path / name).is_file():
            continue
        ids = read_json(path / name).get("eos_token_id")
        if isinstance(ids, int):
            return (ids,)
        if ids:
            return tuple(ids)
    return ()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model folder."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; expected a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def _architecture(config: Mapping[str, Any]) -> ModelArchitecture:
    model_type = _model_type(config)
    _refuse_unsupported(config)
    num_layers, num_heads = _count(config, "num_hidden_layers"), _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", 8 if model_type == "mistral" else num_heads)
    hidden_size = _count(config, "hidden_size")
    head_dim = _count(config, "head_dim", 128 if model_type == "qwen3" else hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"head_dim must be even, got {head_dim}")
    if num_heads % num_kv_heads != 0:
        raise ModelError(
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    has_attention_bias = model_type in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    return ModelArchitecture(
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_count(config, "max_position_embeddings"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        sliding_windows=_sliding_windows(config, model_type, num_layers),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=has_attention_bias or model_type == "qwen2",
        has_o_bias=has_attention_bias,
        has_mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
        has_qk_norm=model_type == "qwen3",
    )


def _model_type(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    name = names[0] if names else None
    known = ARCHITECTURES.get(name) if name is not None else config.get("model_type")
    if known not in ARCHITECTURES.values():
        raise ModelError(
            f"architecture {name or config.get('model_type')!r} is not supported; supported are "
            + ", ".join(ARCHITECTURES)
        )
    return str(known)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Refuses options that change what a model computes and that the decoder does not support.

    All four families call the activation `hidden_act`. Other keys that seem to name one must name the same; numbers and
    truth values, as of `activation_dropout`, name none. Apart from these, only keys of the four families are looked
    at: another family's own keys are ignored.
    """
    if config.get("quantization_config") is not None:
        raise ModelError("quantization_config is not supported; use the model's unquantized weights")
    others = [
        key
        for key, value in config.items()
        if {"act", "activation"} & set(key.split("_")) and value and not isinstance(value, int | float)
    ]
    for key in ("hidden_act", *others):
        if (activation := config.get(key, "silu")) not in ("silu", "swish"):
            raise ModelError(f"{key} {activation!r} is not supported; only 'silu' is")


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} must be a positive integer, got {value!r}")
    return value


def _sliding_windows(config: Mapping[str, Any], model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """Mistral uses windows on every layer; Qwen on those that `layer_types` or `max_window_layers` name."""
    window = config.get("sliding_window", 4096)
    is_used = model_type == "mistral" or (model_type != "llama" and config.get("use_sliding_window", False))
    if not is_used or window is None:
        return (None,) * num_layers
    if not isinstance(window, int) or window < 1:
        raise ModelError(f"sliding_window must be a positive integer or null, got {window!r}")
    if model_type == "mistral":
        return (window,) * num_layers
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != num_layers:
        raise ModelError(
            f"layer_types must list 'full_attention' or 'sliding_attention' for each of {num_layers} "
            f"layers, got {kinds}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in values.values()):
        raise ModelError("rope_parameters that differ between layers are not supported")
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")
    name = values.get("rope_type") or values.get("type") or "default"
    try:
        rope_type = RopeType(name)
    except ValueError:
        supported = ", ".join(kind.value for kind in RopeType)
        raise ModelError(f"rope type {name!r} is not supported; supported are {supported}") from None
    return _rope_of_type(rope_type, values, config)


def _rope_of_type(rope_type: RopeType, values: Mapping[str, Any], config: Mapping[str, Any]) -> RopeConfig:
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if rope_type is RopeType.DEFAULT:
        return RopeConfig(theta=theta)
    max_length = _count(config, "max_position_embeddings")
    original = config.get("original_max_position_embeddings") or values.get(
        "original_max_position_embeddings"
    )
    factor = values.get("factor")
    if factor is None and rope_type is RopeType.YARN and original:
        factor = max_length / original
    keys = ["low_freq_factor", "high_freq_factor"] if rope_type is RopeType.LLAMA3 else []
    missing = [key for key in keys if values.get(key) is None] + (["factor"] if factor is None else [])
    if missing:
        raise ModelError(f"rope type {rope_type.value!r} needs {', '.join(missing)}")
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale")
    given = {key: float(values[key]) for key in (*optional, "mscale_all_dim") if values.get(key) is not None}
    return RopeConfig(
        rope_type=rope_type,
        theta=theta,
        factor=float(factor or 1.0),
        original_max_position_embeddings=int(original or max_length),
        truncate=bool(values.get("truncate", True)),
        **given,
    )
