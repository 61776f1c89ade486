"""ModelArchitecture: a model's shape, as config.json describes it; reads no weights and imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from baton.errors import ModelError
from engine.config_values import MAX_TOKENS, count_of, flag_of, positive_of, refuse_other
from engine.families import DEFAULTS, KEYS_READ, Family, family_of, refuse_unsupported
from engine.latent_config import MAX_GPU_RANK, MAX_GPU_ROTARY_DIM, LatentAttention, read_latent
from engine.mixture_config import Mixture, read_mixtures
from engine.quantization_config import check_kv_cache_scheme, read_quantization
from engine.rope_config import RopeConfig, RopeType, read_rope, read_ropes_by_kind

FULL, SLIDING = "full_attention", "sliding_attention"
"""The values of `layer_types`."""
MAX_LAYERS = 1024
"""A model has at most this many layers. Each layer needs memory before any weight is read."""
_WITHOUT_ATTENTION_BIAS = (Family.MISTRAL, Family.MIXTRAL, Family.MINIMAX_M2, Family.QWEN2, Family.PHI3)
_WITH_MLP_BIAS = (Family.LLAMA, Family.SMOLLM3, Family.GRANITE)
"""The families for which transformers ignores `attention_bias`, and the families for which it reads `mlp_bias`. Qwen2
always has biases on queries, keys and values."""
_WITH_HEAD_NORM = (Family.QWEN3, Family.QWEN3_MOE, Family.GEMMA3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitecture:
    """A decoder with RMSNorm, rotary positions, grouped-query or latent attention, and gated MLPs."""

    family: Family = Family.LLAMA
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """KV heads in the cache; 1 with `latent`."""
    head_dim: int
    """Length of a query and a key in attention. With `latent`: the length of what the cache stores for a token and
    layer."""
    max_position_embeddings: int
    """The number of positions: config.json's, or more if YaRN extends them."""
    rms_norm_eps: float
    ropes: tuple[RopeConfig | None, ...]
    """The rotation of each layer; None: queries and keys are not rotated (NoPE)."""
    sliding_windows: tuple[int | None, ...]
    """For each layer: how many tokens a token attends to, including itself; None means all."""
    mixtures: tuple[Mixture | None, ...]
    """The mixture of experts of each layer; None: one MLP for all tokens."""
    latent: LatentAttention | None = None
    """Latent attention; None: the cache stores the keys and values of heads."""
    attention_scale: float
    """Factor of scores."""
    attention_cap: float | None = None
    """If set, a scaled score s becomes cap x tanh(s / cap)."""
    embedding_scale: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float | None = None
    """If set, a logit x becomes cap x tanh(x / cap)."""
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    has_sinks: bool = False
    """Whether each query head has a sink: a learned logit that takes part in the softmax, but has no
    value."""
    num_guessing_layers: int = 0
    """The number of layers at the end of the checkpoint that guess further tokens (MTP). They are not
    loaded."""

    @property
    def rotated_from(self) -> int:
        """The first rotated dimension of queries and keys: `ropes` apply from here to the end of the head."""
        return 0 if self.latent is None else self.latent.rank

    def kv_heads_on(self, num_ranks: int) -> int:
        """KV heads of each rank: an equal share of all heads, or the whole latent on every rank."""
        return self.num_kv_heads if self.latent is not None else self.num_kv_heads // num_ranks

    def kv_numbers(self, num_ranks: int = 1) -> int:
        """How many numbers all ranks' pools together store for a token and layer."""
        per_rank = self.kv_heads_on(num_ranks) * self.head_dim * (2 if self.latent is None else 1)
        return per_rank * num_ranks

    @property
    def weights_per_token(self) -> int:
        """About how many weights, of all layers and ranks together, are multiplied with each token."""
        if self.latent is not None:
            of_attention = self.latent.num_weights(self.num_heads, self.hidden_size)
        else:
            of_attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        widths = (
            self.intermediate_size if m is None else m.num_chosen * m.intermediate_size + m.shared_size
            for m in self.mixtures
        )
        return self.num_layers * of_attention + 3 * sum(widths) * self.hidden_size

    @property
    def unread_tensors(self) -> tuple[str, ...]:
        """Prefixes of tensors that a checkpoint may have, but that this model does not read."""
        last = self.num_layers + self.num_guessing_layers
        return tuple(f"model.layers.{layer}." for layer in range(self.num_layers, last))

    def of_layers(self, layers: Sequence[int]) -> Self:
        """The architecture with only these layers.

        Every tuple of an architecture has one value for each layer.
        """
        per_layer: dict[str, Any] = {
            field.name: tuple(values[layer] for layer in layers)
            for field in fields(self)
            if isinstance(values := getattr(self, field.name), tuple)
        }
        return replace(self, num_layers=len(layers), **per_layer)


def read_architecture(path: Path, max_model_len: int | None = None) -> ModelArchitecture:
    """Reads `path/config.json`.

    ModelError names a missing key, or an unsupported one that would change results.

    `max_model_len`: the length of the longest request; None: what the model allows. Only LongRoPE depends on
    it.
    """
    config = read_json(path / "config.json")
    try:
        return architecture_of(config, max_model_len)
    except ModelError as error:
        raise ModelError(f"{path / 'config.json'}: {error}") from None


def check_kv_scales(path: Path) -> None:
    """ModelError if `path/config.json` describes 8-bit keys and values in a form that Baton does not support."""
    try:
        check_kv_cache_scheme(read_json(path / "config.json"))
    except ModelError as error:
        raise ModelError(f"{path / 'config.json'}: {error}") from None


def check_device(architecture: ModelArchitecture, device: str) -> None:
    """ModelError if this kind of device (`cpu`, `cuda`) cannot compute the model's attention."""
    latent = architecture.latent
    if latent is None or device != "cuda":
        return
    if latent.rank > MAX_GPU_RANK or latent.rotary_dim > MAX_GPU_ROTARY_DIM:
        raise ModelError(
            f"engine.device 'cuda' supports kv_lora_rank up to {MAX_GPU_RANK} and qk_rope_head_dim up to "
            f"{MAX_GPU_ROTARY_DIM}; this model has {latent.rank} and {latent.rotary_dim}. Use engine.device 'cpu', or "
            f"another model"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file of a model folder."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; expected a Hugging Face model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def architecture_of(given: Mapping[str, Any], max_model_len: int | None = None) -> ModelArchitecture:
    """Like `read_architecture`, for the content of a config.json. Messages do not name the file."""
    family = family_of(given)
    refuse_unsupported(given, family)
    if "use_qk_norm" in KEYS_READ[family] and family is not Family.GLM4_MOE:
        refuse_other(given, "use_qk_norm", True)  # Qwen3-Coder has this key; the norms are always there
    read_quantization(given)  # refuses quantizations that the loader could not read
    config = {**DEFAULTS[family], **given}
    if family is Family.MINIMAX_M2:
        _minimax(config)
    num_layers = count_of(config, "num_hidden_layers", most=MAX_LAYERS)
    num_heads = count_of(config, "num_attention_heads")
    latent = read_latent(config, family)
    num_kv_heads = count_of(config, "num_key_value_heads", num_heads) if latent is None else 1
    hidden_size = count_of(config, "hidden_size")
    max_length = count_of(config, "max_position_embeddings", most=MAX_TOKENS)
    if latent is None:
        default = DEFAULTS[family].get("head_dim", hidden_size // num_heads)
        head_dim = rope_dim = count_of(config, "head_dim", default)
    else:
        head_dim, rope_dim = latent.size, latent.rotary_dim
    if head_dim % 2:
        raise ModelError(f"head_dim must be even, got {head_dim}")
    if num_heads % num_kv_heads != 0:
        raise ModelError(
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    ropes = _ropes(config, family, num_layers, rope_dim, max_length, max_model_len or max_length)
    has_bias = flag_of(config, "attention_bias") and family not in _WITHOUT_ATTENTION_BIAS
    architecture = ModelArchitecture(
        family=family,
        vocab_size=count_of(config, "vocab_size", most=MAX_TOKENS),
        hidden_size=hidden_size,
        intermediate_size=count_of(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_num_positions(ropes, max_length),
        rms_norm_eps=positive_of(config, "rms_norm_eps", DEFAULTS[family].get("rms_norm_eps", 1e-6)),
        ropes=ropes,
        sliding_windows=_sliding_windows(config, family, num_layers),
        mixtures=read_mixtures(config, family, num_layers),
        attention_scale=head_dim**-0.5,
        tie_word_embeddings=flag_of(config, "tie_word_embeddings"),
        has_qkv_bias=has_bias or family is Family.QWEN2,
        has_o_bias=has_bias and family not in (Family.GLM4, Family.GLM4_MOE),
        has_mlp_bias=flag_of(config, "mlp_bias") and family in _WITH_MLP_BIAS,
        has_qk_norm=family in _WITH_HEAD_NORM
        or (family is Family.GLM4_MOE and flag_of(config, "use_qk_norm")),
        num_guessing_layers=_guessing_layers(config, family),
        has_sinks=family is Family.GPT_OSS,
    )
    if family is Family.GRANITE:
        return _granite(architecture, config)
    if latent is not None:
        return replace(architecture, latent=latent, attention_scale=latent.scale(architecture.ropes[0]))
    return _gemma(architecture, config) if family.is_gemma else architecture


def _minimax(config: dict[str, Any]) -> None:
    """Makes `partial_rotary_factor` from `rotary_dim`, as transformers does, and refuses other MiniMax models."""
    refuse_other(config, "qk_norm_type", "per_layer")
    refuse_other(config, "use_routing_bias", True)
    if config.get("rotary_dim") is not None and "partial_rotary_factor" not in config:
        config["partial_rotary_factor"] = count_of(config, "rotary_dim") / count_of(config, "head_dim")


def _granite(architecture: ModelArchitecture, config: Mapping[str, Any]) -> ModelArchitecture:
    """Granite multiplies each branch by `residual_multiplier` before it is added to the residual stream.

    Here the whole stream, with the embedding, is divided by this multiplier instead, and branches are added
    unchanged. A norm of the divided stream gives the same result if its epsilon is divided by the square of
    the multiplier.
    """
    multiplier = positive_of(config, "residual_multiplier", 1.0)
    return replace(
        architecture,
        rms_norm_eps=architecture.rms_norm_eps / multiplier**2,
        attention_scale=positive_of(config, "attention_multiplier", 1.0),
        embedding_scale=positive_of(config, "embedding_multiplier", 1.0) / multiplier,
        logits_divisor=positive_of(config, "logits_scaling", 1.0),
    )


def _gemma(architecture: ModelArchitecture, config: Mapping[str, Any]) -> ModelArchitecture:
    caps = [
        None if config.get(key) is None else positive_of(config, key)
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    ]
    return replace(
        architecture,
        attention_scale=positive_of(config, "query_pre_attn_scalar") ** -0.5,
        attention_cap=caps[0],
        embedding_scale=architecture.hidden_size**0.5,
        logits_cap=caps[1],
    )


def _guessing_layers(config: Mapping[str, Any], family: Family) -> int:
    key = "num_nextn_predict_layers"
    number = config.get(key) or 0 if key in KEYS_READ[family] else 0
    if not isinstance(number, int) or not 0 <= number <= MAX_LAYERS:
        raise ModelError(f"{key} must be an integer from 0 to {MAX_LAYERS:,}, got {number!r:.80}")
    return number


def _ropes(
    config: Mapping[str, Any],
    family: Family,
    num_layers: int,
    head_dim: int,
    max_length: int,
    max_model_len: int,
) -> tuple[RopeConfig | None, ...]:
    if family in (Family.GEMMA3, Family.OLMO3):
        by_kind = read_ropes_by_kind(config, family, head_dim, max_length)
        return tuple(by_kind[kind] for kind in _kinds(config, family, num_layers))
    rope = read_rope(config, family, head_dim, max_length, max_model_len)
    if family is not Family.SMOLLM3:
        return (rope,) * num_layers
    return tuple(rope if rotates else None for rotates in _rotating_layers(config, num_layers))


def _num_positions(ropes: tuple[RopeConfig | None, ...], max_length: int) -> int:
    """The number of positions, which YaRN may extend, but not if other layers have `dynamic` scaling: its angles change
    beyond `max_length`."""
    rotations = [rope for rope in ropes if rope is not None]
    if any(rope.rope_type is RopeType.DYNAMIC for rope in rotations):
        return max_length
    return max([max_length, *(rope.extended_length for rope in rotations)])


def _rotating_layers(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """SmolLM3: 1 for each layer that rotates queries and keys, else 0."""
    interval = count_of(config, "no_rope_layer_interval")
    flags = config.get("no_rope_layers")
    if flags is None:
        return [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) < num_layers or not all(each in (0, 1) for each in flags):
        raise ModelError(
            f"no_rope_layers must list 0 or 1 for each of {num_layers} layers, got {flags!r:.80}"
        )
    return flags[:num_layers]


def _sliding_windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window") if "sliding_window" in KEYS_READ[family] else None
    is_switched = family in (Family.QWEN2, Family.QWEN3, Family.QWEN3_MOE, Family.SMOLLM3)
    if window is None or (is_switched and not flag_of(config, "use_sliding_window")):
        _refuse_sliding_layers(config)
        return (None,) * num_layers
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ModelError(f"sliding_window must be a positive integer or null, got {window!r}")
    if "layer_types" not in KEYS_READ[family]:
        return (window,) * num_layers
    return tuple(window if kind == SLIDING else None for kind in _kinds(config, family, num_layers))


def _refuse_sliding_layers(config: Mapping[str, Any]) -> None:
    """ModelError if `layer_types` names a layer with a window, though other keys switch windows off.

    transformers computes SmolLM3 with these windows, and fails for other families.
    """
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and SLIDING in kinds:
        raise ModelError(
            f"layer_types has {SLIDING!r}, but sliding_window is null, or use_sliding_window is not true"
        )


def _kinds(config: Mapping[str, Any], family: Family, num_layers: int) -> list[str]:
    """The value of `layer_types`, or the family's default pattern."""
    kinds = config.get("layer_types") or _pattern(config, family, num_layers)
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise ModelError(
            f"layer_types must list {FULL!r} or {SLIDING!r} for each of {num_layers} layers, got {kinds!r:.80}"
        )
    return kinds


def _pattern(config: Mapping[str, Any], family: Family, num_layers: int) -> list[str]:
    if family is Family.SMOLLM3:
        slides = [not rotates for rotates in _rotating_layers(config, num_layers)]
    elif family.is_gemma or family in (Family.GPT_OSS, Family.OLMO3):
        every = 4 if family is Family.OLMO3 else 2
        if family is Family.GEMMA3:
            every = count_of(config, "sliding_window_pattern")
        slides = [(layer + 1) % every != 0 for layer in range(num_layers)]
    elif family is Family.MISTRAL:
        slides = [True] * num_layers
    else:
        first = config["max_window_layers"]
        if not isinstance(first, int):
            raise ModelError(f"max_window_layers must be an integer, got {first!r}")
        slides = [layer >= first for layer in range(num_layers)]
    return [SLIDING if each else FULL for each in slides]
