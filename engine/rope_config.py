"""RopeConfig: the rotation of queries and keys, as a config.json describes it; knows no angle."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from baton.errors import ModelError
from engine.config_values import MAX_TOKENS, count_of, flag_of, object_of, positive_of, positive_or_zero_of
from engine.families import DEFAULTS, Family, is_without_effect


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
    extended_length: int = 0
    """To how many positions YaRN extends the model; 0 if the original number is not given."""
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
ROPE_VALUES_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
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
_THETA = 10_000.0
"""The base of the angles if neither a config.json nor its family names one."""
_PARTLY_ROTATED = (Family.PHI3, Family.GLM4, Family.GLM4_MOE, Family.MINIMAX_M2)
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

    If a file has both, `rope_scaling` replaces `rope_parameters`, as in transformers. `max_length`: the number of the
    model's positions; `max_model_len`: how many of them requests may use.
    """
    new, old = object_of(config, "rope_parameters"), object_of(config, "rope_scaling")
    if old:
        _refuse_lost_keys(config, family, new, old)
    values = old or new or dict(_OWN.get(family, {}))
    return _rope(values, config, family, head_dim, max_length, max_model_len)


def read_ropes_by_kind(
    config: Mapping[str, Any], family: Family, head_dim: int, max_length: int
) -> dict[str, RopeConfig]:
    """Gemma 3 and OLMo 3: the rotation of each kind in `layer_types`.

    `rope_scaling` is for layers without a window, and replaces single keys of their `rope_parameters`. As in
    transformers, `original_max_position_embeddings` counts only in these two objects, not at the top of the file.
    transformers ignores their `truncate`, so `false` is refused.
    """
    new, old = object_of(config, "rope_parameters"), object_of(config, "rope_scaling")
    unknown = set(new) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"rope_parameters: {sorted(unknown)[0]!r} is not supported for {family.value!r}")
    full = (object_of(new, "full_attention") if new else {"rope_type": "default"}) | old
    sliding = object_of(new, "sliding_attention")
    if any(not flag_of(values, "truncate", True) for values in (full, sliding)):
        raise ModelError(f"truncate False of a rotation is not supported for {family.value!r}")
    if sliding.get("rope_theta") is None:
        sliding["rope_theta"] = _theta_within_windows(config, family)
    rest = {key: value for key, value in config.items() if key != "original_max_position_embeddings"}
    return {
        kind: _rope(values, rest, family, head_dim, max_length, max_length)
        for kind, values in (("full_attention", full), ("sliding_attention", sliding))
    }


def _theta_within_windows(config: Mapping[str, Any], family: Family) -> float:
    """The base of the angles in layers with a window, if their `rope_parameters` name none.

    transformers reads OLMo 3's `rope_theta` only for layers without a window.
    """
    key = "rope_local_base_freq" if family is Family.GEMMA3 else "rope_theta"
    default: float = DEFAULTS[family][key]
    theta = positive_of(config, key, default)
    if family is Family.OLMO3 and theta != default:
        raise ModelError(
            f"rope_theta {theta:g} would be lost in layers with a window, for which transformers takes {default:g}; "
            "give full_attention and sliding_attention in rope_parameters their own rope_theta"
        )
    return theta


def _refuse_lost_keys(
    config: Mapping[str, Any], family: Family, new: Mapping[str, Any], old: Mapping[str, Any]
) -> None:
    """ModelError if `rope_scaling` would replace the model's base or rotated share by the family's default.

    transformers computes such a model with the default, so its answers are of no use.
    """
    for key, default in (("rope_theta", _THETA), ("partial_rotary_factor", 1.0)):
        used = DEFAULTS[family].get(key, default) if config.get(key) is None else config[key]
        if new.get(key) is not None and old.get(key) is None and new[key] != used:
            raise ModelError(
                f"rope_scaling would replace rope_parameters, whose {key} ({new[key]!r:.80}) would be lost; move the "
                "keys of rope_scaling into rope_parameters, and remove rope_scaling"
            )


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
    for key, harmless in ROPE_VALUES_WITHOUT_EFFECT.items():
        if not is_without_effect(values.get(key), harmless):
            raise ModelError(f"{key} {values[key]!r:.80} of a rotation is not supported")
    rotary_dim = _rotary_dim(
        values.get("partial_rotary_factor", config.get("partial_rotary_factor")), family, head_dim
    )
    rope_type = _type(values, family)
    given = config if values.get("rope_theta") is None else values
    theta = positive_of(given, "rope_theta", DEFAULTS[family].get("rope_theta", _THETA))
    plain = RopeConfig(rope_type=rope_type, theta=theta, rotary_dim=rotary_dim)
    if rope_type is RopeType.DEFAULT:
        return plain
    key = "original_max_position_embeddings"
    given = values if config.get(key) is None else config
    original = None if given.get(key) is None else count_of(given, key, most=MAX_TOKENS)
    if rope_type is RopeType.LONGROPE:
        return _longrope(
            plain, values, rotary_dim or head_dim, original or max_length, max_length, max_model_len
        )
    return _scaled(plain, values, original, max_length)


def _type(values: Mapping[str, Any], family: Family) -> RopeType:
    names = [values[key] for key in ("rope_type", "type") if values.get(key)] or ["default"]
    if family is Family.PHI3:
        names = [_OLD_NAMES.get(str(name), name) for name in names]
    supported = {kind.value: kind for kind in _TYPES[family]}
    if not isinstance(names[0], str) or names[0] not in supported:
        raise ModelError(f"rope type {names[0]!r:.80} is not supported; supported are {', '.join(supported)}")
    if names[-1] != names[0]:
        raise ModelError(f"rope_type ({names[0]!r}) and type ({names[-1]!r:.80}) of a rotation must be equal")
    return supported[names[0]]


def _rotary_dim(factor: object, family: Family, head_dim: int) -> int | None:
    if factor is None or factor == 1.0:
        return None
    if family not in _PARTLY_ROTATED:
        raise ModelError(f"partial_rotary_factor {factor!r:.80} is not supported; only 1.0 is")
    dim = int(head_dim * factor) if isinstance(factor, int | float) and 0.0 < factor < 1.0 else 0
    if not 0 < dim < head_dim or dim % 2:
        raise ModelError(
            f"partial_rotary_factor {factor!r:.80} of heads of {head_dim} does not give an even number of dimensions"
        )
    return dim


def _scaled(
    plain: RopeConfig, values: Mapping[str, Any], original: int | None, max_length: int
) -> RopeConfig:
    length_factor = max_length / original if plain.rope_type is RopeType.YARN and original else None
    needed = ["low_freq_factor", "high_freq_factor"] if plain.rope_type is RopeType.LLAMA3 else []
    if length_factor is None:
        needed.append("factor")
    if missing := [key for key in needed if values.get(key) is None]:
        raise ModelError(f"rope type {plain.rope_type.value!r} needs {', '.join(missing)}")
    if plain.rope_type is RopeType.YARN and plain.theta == 1.0:
        raise ModelError("rope_theta of rope type 'yarn' must not be 1")
    low, high = positive_of(values, "low_freq_factor", 1.0), positive_of(values, "high_freq_factor", 4.0)
    if low >= high:
        raise ModelError(f"high_freq_factor ({high:g}) must be greater than low_freq_factor ({low:g})")
    factor = positive_of(values, "factor", length_factor)
    extended = int(factor * original) if plain.rope_type is RopeType.YARN and original else 0
    if extended >= 2**31:
        raise ModelError(
            f"factor ({factor:g}) times original_max_position_embeddings ({original:,}) must be less than 2**31"
        )
    return replace(
        plain,
        factor=factor,
        original_max_position_embeddings=original or max_length,
        extended_length=extended,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=positive_or_zero_of(values, "beta_fast") or plain.beta_fast,
        beta_slow=positive_or_zero_of(values, "beta_slow") or plain.beta_slow,
        attention_factor=_attention_factor(values),
        mscale=positive_or_zero_of(values, "mscale"),
        mscale_all_dim=positive_or_zero_of(values, "mscale_all_dim"),
        truncate=flag_of(values, "truncate", True),
    )


def _attention_factor(values: Mapping[str, Any]) -> float | None:
    return None if values.get("attention_factor") is None else positive_of(values, "attention_factor")


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
        isinstance(each, int | float) and 0.0 < each < 1e30 for each in divisors
    )
    if not is_list or len(divisors) != rotary_dim // 2:
        raise ModelError(f"rope type 'longrope' needs {key}, a list of {rotary_dim // 2} positive numbers")
    if original == 1:
        raise ModelError("original_max_position_embeddings of rope type 'longrope' must be at least 2, got 1")
    return replace(
        plain,
        factor=positive_of(values, "factor", max_length / original),
        original_max_position_embeddings=original,
        attention_factor=_attention_factor(values),
        divisors=tuple(map(float, divisors)),
        divisors_key=key,
    )


def mscale(factor: float, weight: float) -> float:
    """YaRN's attention temperature for a context that is `factor` times as long."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
