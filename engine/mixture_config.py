"""Mixture: a model's experts, and how tokens choose among them, as a config.json describes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import ModelError
from engine.activation import Activation, ClampedSwiglu, Gate
from engine.config_values import count_of, flag_of, positive_of, refuse_other
from engine.families import KEYS_READ, Family

LEAST_SUM = 1e-20
"""Added to sums of sigmoids, which may all be 0."""
MAX_EXPERTS = 4096
"""A layer has at most this many experts. llama.cpp's limit is 512."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Experts instead of one MLP: each token uses the gated MLPs that the router scores highest."""

    num_experts: int
    num_chosen: int
    """How many experts each token uses."""
    intermediate_size: int
    """Intermediate size of an expert."""
    is_normalized: bool
    """Whether the weights of a token's experts are normalized to the sum 1; else the weights are the
    scores."""
    is_sigmoid: bool = False
    """Whether a score is the sigmoid of a logit; else scores are the softmax over all experts."""
    routes_in_float32: bool = False
    """Whether the router computes in float32, whatever the model's dtype is."""
    has_choice_bias: bool = False
    """Whether the choice of experts adds a bias to each expert's score; weights ignore it (DeepSeek-V3,
    2024)."""
    num_groups: int = 1
    """Number of groups of neighbouring experts. A token's experts come from the best `num_chosen_groups`
    groups."""
    num_chosen_groups: int = 1
    num_compared: int = 1
    """How many of a group's best scores are added up to compare groups."""
    scale: float = 1.0
    """Factor of the experts' weights."""
    activation: Activation = Gate.SILU
    shared_size: int = 0
    """Intermediate size of the MLP that all tokens use in addition to their experts; 0 means no such MLP."""

    def experts_on(self, rank: int, num_ranks: int) -> range:
        """The neighbouring experts of a rank, if each rank has whole experts.

        If the ranks cannot divide the experts equally, some ranks have one more expert."""
        first, last = (each * self.num_experts // num_ranks for each in (rank, rank + 1))
        return range(first, last)


def read_mixtures(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[Mixture | None, ...]:
    """The mixture of every layer; None for a layer with an MLP. ModelError names an unsupported key."""
    if family.has_shared_experts:
        are_dense = _dense_layers(config, family, num_layers)
        mixture = None if all(are_dense) else _with_shared_experts(config, family)
        return tuple(None if is_dense else mixture for is_dense in are_dense)
    if "num_experts" not in KEYS_READ[family]:
        return (None,) * num_layers
    is_qwen = family is Family.QWEN3_MOE
    _check_equal(config, "num_experts_per_tok", "experts_per_token")
    num_experts, num_chosen = _num_experts(config, family), count_of(config, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(
            f"num_experts_per_tok must be at most the number of experts, {num_experts}, got {num_chosen}"
        )
    is_minimax = family is Family.MINIMAX_M2
    if is_minimax:
        refuse_other(config, "scoring_func", "sigmoid")
    mixture = Mixture(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=count_of(config, "moe_intermediate_size" if is_qwen else "intermediate_size"),
        is_normalized=not is_qwen or flag_of(config, "norm_topk_prob"),
        is_sigmoid=is_minimax,
        routes_in_float32=is_minimax,
        has_choice_bias=is_minimax,
        activation=_clamped(config) if family is Family.GPT_OSS else Gate.SILU,
    )
    every = count_of(config, "decoder_sparse_step") if is_qwen else 1
    dense = config.get("mlp_only_layers") or [] if is_qwen else []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ModelError(f"mlp_only_layers must be a list of layers, got {dense!r:.80}")
    return tuple(None if layer in dense or (layer + 1) % every else mixture for layer in range(num_layers))


def _num_experts(config: Mapping[str, Any], family: Family) -> int:
    """The number of experts. transformers has two keys for it, and accepts either."""
    _check_equal(config, "num_experts", "num_local_experts")
    key = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    default = {Family.MIXTRAL: 8, Family.MINIMAX_M2: 256}.get(family, 128)
    return count_of(config, key, default, most=MAX_EXPERTS)


def _clamped(config: Mapping[str, Any]) -> ClampedSwiglu:
    return ClampedSwiglu(alpha=positive_of(config, "swiglu_alpha"), limit=positive_of(config, "swiglu_limit"))


def _check_equal(config: Mapping[str, Any], *names: str) -> None:
    """ModelError if keys that mean the same have different values."""
    keys = [key for key in names if config.get(key) is not None]
    if any(config[key] != config[keys[0]] for key in keys):
        raise ModelError(f"{' and '.join(f'{key} ({config[key]!r})' for key in keys)} must be equal")


def _dense_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """Whether each layer has one MLP instead of experts."""
    num_dense = config.get("first_k_dense_replace")
    if not isinstance(num_dense, int) or num_dense < 0:
        raise ModelError(f"first_k_dense_replace must be an integer of at least 0, got {num_dense!r}")
    kinds = config.get("mlp_layer_types") if "mlp_layer_types" in KEYS_READ[family] else None
    if kinds is None:
        return [layer < num_dense for layer in range(num_layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(kind in ("dense", "sparse") for kind in kinds)
    ):
        raise ModelError(
            f"mlp_layer_types must list 'dense' or 'sparse' for each of {num_layers} layers, got {kinds!r:.80}"
        )
    return [kind == "dense" for kind in kinds]


def _with_shared_experts(config: Mapping[str, Any], family: Family) -> Mixture:
    is_v3 = family is not Family.DEEPSEEK_V2  # or GLM-4.5, which chooses its experts like DeepSeek-V3
    refuse_other(config, "moe_layer_freq", 1)
    refuse_other(config, "scoring_func", "sigmoid" if is_v3 else "softmax")
    if is_v3:
        refuse_other(config, "topk_method", "noaux_tc")
    else:
        refuse_other(config, "norm_topk_prob", False)
        refuse_other(config, "topk_method", "greedy", "group_limited_greedy")
    is_grouped = is_v3 or config.get("topk_method") == "group_limited_greedy"
    size = count_of(config, "moe_intermediate_size")
    num_experts = count_of(config, "n_routed_experts", most=MAX_EXPERTS)
    num_groups, num_chosen_groups, num_chosen = _groups(config, num_experts, is_grouped=is_grouped)
    return Mixture(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=size,
        is_normalized=is_v3 and flag_of(config, "norm_topk_prob"),
        is_sigmoid=is_v3,
        routes_in_float32=True,
        has_choice_bias=is_v3,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        num_compared=2 if is_v3 else 1,
        scale=positive_of(config, "routed_scaling_factor"),
        shared_size=size * count_of(config, "n_shared_experts"),
    )


def _groups(config: Mapping[str, Any], num_experts: int, *, is_grouped: bool) -> tuple[int, int, int]:
    """The number of groups, and how many groups and experts a token chooses."""
    num_groups = count_of(config, "n_group") if is_grouped else 1
    num_chosen_groups = count_of(config, "topk_group") if is_grouped else 1
    per_group, rest = divmod(num_experts, num_groups)
    if rest or (num_groups > 1 and per_group < 2):
        raise ModelError(
            f"n_group must divide the {num_experts} experts into equal groups of two or more, got {num_groups}"
        )
    if num_chosen_groups > num_groups:
        raise ModelError(f"topk_group must be at most n_group, {num_groups}, got {num_chosen_groups}")
    num_chosen, most = count_of(config, "num_experts_per_tok"), num_chosen_groups * per_group
    if num_chosen > most:
        raise ModelError(
            f"num_experts_per_tok must be at most the {most} experts of a choice, got {num_chosen}"
        )
    return num_groups, num_chosen_groups, num_chosen
