"""RopeConfig: the rotation of queries and keys, as a config.json describes it; knows no angle."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from baton.errors import ModelError
from engine.families import Family, is_without_effect


class RopeType(Enum):
    """How rotary frequencies are changed for contexts longer than those of the pretraining."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; fields that a type does not use keep their defaults."""

    rope_type: RopeType = RopeType.DEFAULT
    theta: float = 10_000.0
    rotary_dim: int | None = None
    """How many of a head's first dimensions are rotated; None: all."""
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
    divisors: tuple[float, ...] = ()
    """LongRoPE's divisor of each frequency."""
    divisors_key: str = ""
    """The key of these divisors: `short_factor` or `long_factor`."""


_TYPES: dict[Family, tuple[RopeType, ...]] = {
    family: tuple(kind for kind in RopeType if kind is not RopeType.LONGROPE) for family in Family
}
_TYPES[Family.PHI3] = (RopeType.DEFAULT, RopeType.LONGROPE)
ROPE_KEYS_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "attn_factor": (1.0,),
    "extrapolation_factor": (1.0,),
    "llama_4_scaling_beta": (),
    "long_mscale": (),
    "mrope_section": (),
    "short_mscale": (),
}
"""Keys of a rotation that change what a model computes. With the listed values, or null, they change
nothing."""
_OLD_NAMES = {"su": "longrope", "yarn": "longrope"}
"""Names of rotations in Phi-3's first versions, and their present names."""
_PARTIAL = (Family.PHI3, Family.GLM4)
_OWN: Mapping[Family, Mapping[str, Any]] = {
    Family.GPT_OSS: {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
}
"""The values that transformers uses if a config.json has no `rope_parameters`."""


def read_rope(
    config: Mapping[str, Any], family: Family, head_dim: int, max_length: int, max_model_len: int
) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    `max_length`: the number of the model's positions; `max_model_len`: how many of them requests may use.
    """
    own = _OWN.get(family, {})
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or own)
    return _rope(values, config, family, head_dim, max_length, max_model_len)


def read_ropes_by_kind(
    config: Mapping[str, Any], family: Family, head_dim: int, max_length: int
) -> dict[str, RopeConfig]:
    """Gemma 3: the rotation of each kind in `layer_types`. `rope_scaling` is for layers without a window."""
    new = config.get("rope_parameters") or {}
    unknown = set(new) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"rope_parameters: {sorted(unknown)[0]!r} is not supported for {family.value!r}")
    full = {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    sliding = {"rope_theta": config["rope_local_base_freq"]}
    return {
        kind: _rope({**old, **(new.get(kind) or {})}, config, family, head_dim, max_length, max_length)
        for kind, old in (("full_attention", full), ("sliding_attention", sliding))
    }


def _rope(
    values: Mapping[str, Any],
    config: Mapping[str, Any],
    family: Family,
    head_dim: int,
    max_length: int,
    max_model_len: int,
) -> RopeConfig:
    if any(isinstance(value, dict) for value in values.values()):
        raise ModelError("rope_parameters that differ between layers are not supported")
    for key, harmless in ROPE_KEYS_WITHOUT_EFFECT.items():
        if not is_without_effect(values.get(key), harmless):
            raise ModelError(f"{key} {values[key]!r:.80} of a rotation is not supported")
    rotary_dim = _rotary_dim(
        values.get("partial_rotary_factor", config.get("partial_rotary_factor")), family, head_dim
    )
    name = values.get("rope_type") or values.get("type") or "default"
    if family is Family.PHI3:
        name = _OLD_NAMES.get(name, name)
    supported = {kind.value: kind for kind in _TYPES[family]}
    if name not in supported:
        raise ModelError(f"rope type {name!r} is not supported; supported are {', '.join(supported)}")
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    plain = RopeConfig(rope_type=supported[name], theta=theta, rotary_dim=rotary_dim)
    if plain.rope_type is RopeType.DEFAULT:
        return plain
    original = config.get("original_max_position_embeddings") or values.get(
        "original_max_position_embeddings"
    )
    if plain.rope_type is RopeType.LONGROPE:
        return _longrope(
            plain, values, rotary_dim or head_dim, int(original or max_length), max_length, max_model_len
        )
    return _scaled(plain, values, original, max_length)


def _rotary_dim(factor: object, family: Family, head_dim: int) -> int | None:
    if factor is None or factor == 1.0:
        return None
    if family not in _PARTIAL:
        raise ModelError(f"partial_rotary_factor {factor} is not supported; only 1.0 is")
    dim = int(head_dim * factor) if isinstance(factor, int | float) else 0
    if not 0 < dim < head_dim or dim % 2:
        raise ModelError(
            f"partial_rotary_factor {factor!r} of heads of {head_dim} does not give an even number of dimensions"
        )
    return dim


def _scaled(
    plain: RopeConfig, values: Mapping[str, Any], original: int | None, max_length: int
) -> RopeConfig:
    factor = values.get("factor")
    if factor is None and plain.rope_type is RopeType.YARN and original:
        factor = max_length / original
    keys = ["low_freq_factor", "high_freq_factor"] if plain.rope_type is RopeType.LLAMA3 else []
    missing = [key for key in keys if values.get(key) is None] + (["factor"] if factor is None else [])
    if missing:
        raise ModelError(f"rope type {plain.rope_type.value!r} needs {', '.join(missing)}")
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale")
    given: dict[str, Any] = {
        key: float(values[key]) for key in (*optional, "mscale_all_dim") if values.get(key) is not None
    }
    return replace(
        plain,
        factor=float(factor or 1.0),
        original_max_position_embeddings=int(original or max_length),
        truncate=bool(values.get("truncate", True)),
        **given,
    )


def _longrope(
    plain: RopeConfig,
    values: Mapping[str, Any],
    rotary_dim: int,
    original: int,
    max_length: int,
    max_model_len: int,
) -> RopeConfig:
    """LongRoPE (2024): short factors for requests up to the original length, long factors for longer ones.

    Keys in the cache cannot change from short to long factors. So all requests use the factors of the longest
    request that is allowed.
    """
    key = "long_factor" if max_model_len > original else "short_factor"
    divisors: Any = values.get(key)
    is_list = isinstance(divisors, list) and all(
        isinstance(each, int | float) and each > 0 for each in divisors
    )
    if not is_list or len(divisors) != rotary_dim // 2:
        raise ModelError(f"rope type 'longrope' needs {key}, a list of {rotary_dim // 2} positive numbers")
    factor, attention_factor = values.get("factor"), values.get("attention_factor")
    return replace(
        plain,
        factor=float(factor if factor is not None else max_length / original),
        original_max_position_embeddings=original,
        attention_factor=None if attention_factor is None else float(attention_factor),
        divisors=tuple(map(float, divisors)),
        divisors_key=key,
    )


def mscale(factor: float, weight: float) -> float:
    """YaRN's attention temperature for a context that is `factor` times as long."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
