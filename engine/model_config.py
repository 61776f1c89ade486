"""ModelArchitecture: what a config.json says about the shape of a model; reads no weights and imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, Self

from baton.errors import ModelError
from engine.families import DEFAULTS, READ, Family, family_of, refuse_unsupported
from engine.quantization_config import read_quantization
from engine.rope_config import RopeConfig, read_rope, read_ropes_by_kind

FULL, SLIDING = "full_attention", "sliding_attention"
"""Of `layer_types`."""
_WITHOUT_ATTENTION_BIAS = (Family.MISTRAL, Family.MIXTRAL, Family.QWEN2, Family.PHI3)
_WITH_MLP_BIAS = (Family.LLAMA, Family.SMOLLM3, Family.GRANITE)
"""Whether transformers reads `attention_bias` and `mlp_bias`. Qwen2 always has biases on queries, keys and values."""


class Gate(Enum):
    """The activation of a gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU (2016), by its approximation with a tanh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiglu:
    """gpt-oss's: (up + 1) x gate x sigmoid(alpha x gate); gates are at most `limit`, ups between -limit and limit."""

    alpha: float
    limit: float


Activation = Gate | ClampedSwiglu
"""How the two halves of a gated MLP's inner values become one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A mixture of experts in the MLP's place: each token takes the gated MLPs that its router scores highest."""

    num_experts: int
    num_chosen: int
    """By each token."""
    intermediate_size: int
    """Of an expert."""
    is_normalised: bool
    """Whether the weights of a token's experts add up to 1; else they are probabilities among all experts."""
    activation: Activation = Gate.SILU


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitecture:
    """A decoder with RMSNorm, rotary positions, grouped-query attention and gated MLPs."""

    family: Family = Family.LLAMA
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    ropes: tuple[RopeConfig | None, ...]
    """Per layer; None: queries and keys are not rotated (NoPE)."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many tokens a token sees, itself included; None means all."""
    mixtures: tuple[Mixture | None, ...]
    """Per layer; None: one MLP for all tokens."""
    attention_scale: float
    """Of scores."""
    attention_cap: float | None = None
    """A scaled score s becomes cap x tanh(s / cap)."""
    embedding_scale: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float | None = None
    """As `attention_cap`."""
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    has_sinks: bool = False
    """Whether each query head has a sink: a logit of its own beside its scores, which takes weight and has no value."""

    def of_layers(self, layers: Sequence[int]) -> Self:
        """A model of these layers. Every tuple of an architecture has a value for each layer."""
        per_layer: dict[str, Any] = {
            field.name: tuple(values[layer] for layer in layers)
            for field in fields(self)
            if isinstance(values := getattr(self, field.name), tuple)
        }
        return replace(self, num_layers=len(layers), **per_layer)


def read_architecture(path: Path, max_model_len: int | None = None) -> ModelArchitecture:
    """Reads `path/config.json`; ModelError names what is missing, or is unsupported and would change results.

    `max_model_len`: of the longest request; None: as long as the model allows. Only LongRoPE depends on it.
    """
    config = read_json(path / "config.json")
    try:
        return _architecture(config, max_model_len)
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


def _architecture(given: Mapping[str, Any], max_model_len: int | None) -> ModelArchitecture:
    family = family_of(given)
    refuse_unsupported(given, family)
    read_quantization(given)  # refuses what the loader could not read
    config = {**DEFAULTS[family], **given}
    num_layers, num_heads = _count(config, "num_hidden_layers"), _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", num_heads)
    hidden_size, max_length = _count(config, "hidden_size"), _count(config, "max_position_embeddings")
    head_dim = _count(config, "head_dim", DEFAULTS[family].get("head_dim", hidden_size // num_heads))
    if head_dim % 2:
        raise ModelError(f"head_dim must be even, got {head_dim}")
    if num_heads % num_kv_heads != 0:
        raise ModelError(
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    has_bias = bool(config.get("attention_bias", False)) and family not in _WITHOUT_ATTENTION_BIAS
    architecture = ModelArchitecture(
        family=family,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_length,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        ropes=_ropes(config, family, num_layers, head_dim, max_length, max_model_len or max_length),
        sliding_windows=_sliding_windows(config, family, num_layers),
        mixtures=_mixtures(config, family, num_layers),
        attention_scale=head_dim**-0.5,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=has_bias or family is Family.QWEN2,
        has_o_bias=has_bias and family is not Family.GLM4,
        has_mlp_bias=bool(config.get("mlp_bias", False)) and family in _WITH_MLP_BIAS,
        has_qk_norm=family in (Family.QWEN3, Family.QWEN3_MOE, Family.GEMMA3),
        has_sinks=family is Family.GPT_OSS,
    )
    if family is Family.GRANITE:
        return _granite(architecture, config)
    return _gemma(architecture, config) if family.is_gemma else architecture


def _granite(architecture: ModelArchitecture, config: Mapping[str, Any]) -> ModelArchitecture:
    """A branch is multiplied by `residual_multiplier` before it is added.

    The residual stream is kept divided by it instead, and the embedding with it: branches are then added as they are.
    A norm of the smaller stream is the same with an epsilon divided by its square.
    """
    multiplier = _positive(config, "residual_multiplier", 1.0)
    return replace(
        architecture,
        rms_norm_eps=architecture.rms_norm_eps / multiplier**2,
        attention_scale=_positive(config, "attention_multiplier", 1.0),
        embedding_scale=_positive(config, "embedding_multiplier", 1.0) / multiplier,
        logits_divisor=_positive(config, "logits_scaling", 1.0),
    )


def _gemma(architecture: ModelArchitecture, config: Mapping[str, Any]) -> ModelArchitecture:
    caps = [
        None if config.get(key) is None else _positive(config, key)
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    ]
    return replace(
        architecture,
        attention_scale=_positive(config, "query_pre_attn_scalar") ** -0.5,
        attention_cap=caps[0],
        embedding_scale=architecture.hidden_size**0.5,
        logits_cap=caps[1],
    )


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} must be a positive integer, got {value!r}")
    return value


def _positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int | float) or not 0.0 < value < 1e30:
        raise ModelError(f"{key} must be a positive number, got {value!r}")
    return float(value)


def _ropes(
    config: Mapping[str, Any],
    family: Family,
    num_layers: int,
    head_dim: int,
    max_length: int,
    max_model_len: int,
) -> tuple[RopeConfig | None, ...]:
    if family is Family.GEMMA3:
        by_kind = read_ropes_by_kind(config, family, head_dim, max_length)
        return tuple(by_kind[kind] for kind in _kinds(config, family, num_layers))
    rope = read_rope(config, family, head_dim, max_length, max_model_len)
    if family is not Family.SMOLLM3:
        return (rope,) * num_layers
    return tuple(rope if rotates else None for rotates in _rotating_layers(config, num_layers))


def _rotating_layers(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """SmolLM3: 0 for a layer that does not rotate, else 1."""
    interval = _count(config, "no_rope_layer_interval")
    flags = config.get("no_rope_layers")
    if flags is None:
        return [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) < num_layers or not set(flags) <= {0, 1}:
        raise ModelError(
            f"no_rope_layers must list 0 or 1 for each of {num_layers} layers, got {flags!r:.80}"
        )
    return flags[:num_layers]


def _sliding_windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window") if "sliding_window" in READ[family] else None
    is_switched = family in (Family.QWEN2, Family.QWEN3, Family.QWEN3_MOE, Family.SMOLLM3)
    if window is None or (is_switched and not config.get("use_sliding_window", False)):
        return (None,) * num_layers
    if not isinstance(window, int) or window < 1:
        raise ModelError(f"sliding_window must be a positive integer or null, got {window!r}")
    if "layer_types" not in READ[family]:
        return (window,) * num_layers
    return tuple(window if kind == SLIDING else None for kind in _kinds(config, family, num_layers))


def _mixtures(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[Mixture | None, ...]:
    if "num_experts" not in READ[family]:
        return (None,) * num_layers
    is_qwen = family is Family.QWEN3_MOE
    _check_equal(config, "num_experts_per_tok", "experts_per_token")
    num_experts, num_chosen = _num_experts(config, family), _count(config, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(
            f"num_experts_per_tok must be at most the number of experts, {num_experts}, got {num_chosen}"
        )
    mixture = Mixture(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=_count(config, "moe_intermediate_size" if is_qwen else "intermediate_size"),
        is_normalised=not is_qwen or bool(config.get("norm_topk_prob", False)),
        activation=_clamped(config) if family is Family.GPT_OSS else Gate.SILU,
    )
    every = _count(config, "decoder_sparse_step") if is_qwen else 1
    dense = config.get("mlp_only_layers") or [] if is_qwen else []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ModelError(f"mlp_only_layers must be a list of layers, got {dense!r:.80}")
    return tuple(None if layer in dense or (layer + 1) % every else mixture for layer in range(num_layers))


def _num_experts(config: Mapping[str, Any], family: Family) -> int:
    """transformers has two names for it, and takes either."""
    _check_equal(config, "num_experts", "num_local_experts")
    key = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    return _count(config, key, 8 if family is Family.MIXTRAL else 128)


def _clamped(config: Mapping[str, Any]) -> ClampedSwiglu:
    return ClampedSwiglu(alpha=_positive(config, "swiglu_alpha"), limit=_positive(config, "swiglu_limit"))


def _check_equal(config: Mapping[str, Any], *names: str) -> None:
    """Two names of one value."""
    keys = [key for key in names if config.get(key) is not None]
    if any(config[key] != config[keys[0]] for key in keys):
        raise ModelError(f"{' and '.join(f'{key} ({config[key]!r})' for key in keys)} must be equal")


def _kinds(config: Mapping[str, Any], family: Family, num_layers: int) -> list[str]:
    """`layer_types`, or the family's own pattern."""
    kinds = config.get("layer_types") or _pattern(config, family, num_layers)
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {FULL, SLIDING}:
        raise ModelError(
            f"layer_types must list {FULL!r} or {SLIDING!r} for each of {num_layers} layers, got {kinds}"
        )
    return kinds


def _pattern(config: Mapping[str, Any], family: Family, num_layers: int) -> list[str]:
    if family is Family.SMOLLM3:
        slides = [not rotates for rotates in _rotating_layers(config, num_layers)]
    elif family.is_gemma or family is Family.GPT_OSS:
        every = _count(config, "sliding_window_pattern") if family is Family.GEMMA3 else 2
        slides = [(layer + 1) % every != 0 for layer in range(num_layers)]
    else:
        first = config["max_window_layers"]
        if not isinstance(first, int):
            raise ModelError(f"max_window_layers must be an integer, got {first!r}")
        slides = [layer >= first for layer in range(num_layers)]
    return [SLIDING if each else FULL for each in slides]
