"""LatentAttention: multi-head latent attention, as a config.json describes it; knows no tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import ModelError
from engine.config_values import count_of, flag_of
from engine.families import Family
from engine.rope_config import RopeConfig, mscale

MAX_GPU_RANK, MAX_GPU_ROTARY_DIM = 512, 64
"""The longest latent and the longest rotated part on a GPU: those of DeepSeek's models. For greater lengths, the sums
of attention would not fit into registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """MLA (DeepSeek-V2, 2024): keys and values of all heads are projections of one vector of a token, its *latent*.

    A key is such a projection, followed by a rotated part that all heads share. The cache stores the latent
    and the rotated part of each token. Attention uses both together as one key of all heads. For this, it
    projects queries into the latent space. The latent is also the value of all heads.
    """

    rank: int
    """Length of a latent."""
    rotary_dim: int
    """Length of the rotated part of a query or key, which comes last."""
    plain_dim: int
    """Length of the part of a query or key that is not rotated."""
    value_dim: int
    query_rank: int | None
    """If set, queries are projections of a vector of this length. None: they are projections of the hidden
    state."""
    is_interleaved: bool
    """Whether the two numbers of a rotated pair are neighbours in the checkpoint."""

    @property
    def size(self) -> int:
        """How many numbers the cache stores for a token and layer."""
        return self.rank + self.rotary_dim

    @property
    def query_dim(self) -> int:
        """Length of a head's query in the checkpoint."""
        return self.plain_dim + self.rotary_dim

    def num_weights(self, num_heads: int, hidden_size: int) -> int:
        """How many weights the attention of a layer has."""
        queries = num_heads * self.query_dim
        from_hidden = self.size + num_heads * self.value_dim + (self.query_rank or queries)
        per_head = self.rank * (self.plain_dim + self.value_dim)
        return from_hidden * hidden_size + queries * (self.query_rank or 0) + num_heads * per_head

    def scale(self, rope: RopeConfig | None) -> float:
        """Factor of scores, with the part of YaRN's attention temperature that the rotation does not contain."""
        factor = 1.0
        if rope is not None and rope.mscale_all_dim:
            factor = mscale(rope.factor, rope.mscale_all_dim) ** 2
        return factor * float(self.query_dim**-0.5)


def read_latent(config: Mapping[str, Any], family: Family) -> LatentAttention | None:
    """The latent attention of a model; None if its heads have their own keys and values. ModelError names an
    unsupported key."""
    if not family.has_latent:
        return None
    num_heads, num_kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if num_kv_heads not in (None, num_heads):
        raise ModelError(
            f"num_key_value_heads ({num_kv_heads}) must equal num_attention_heads ({num_heads}): heads share a latent"
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ModelError(f"{key} {config[key]!r:.80} is not supported for model_type {family.value!r}")
    is_interleaved = flag_of(config, "rope_interleave", True) or family is Family.DEEPSEEK_V2
    latent = LatentAttention(
        rank=count_of(config, "kv_lora_rank"),
        rotary_dim=count_of(config, "qk_rope_head_dim"),
        plain_dim=count_of(config, "qk_nope_head_dim"),
        value_dim=count_of(config, "v_head_dim"),
        query_rank=None if config.get("q_lora_rank") is None else count_of(config, "q_lora_rank"),
        is_interleaved=is_interleaved,
    )
    for key, size in (("kv_lora_rank", latent.rank), ("qk_rope_head_dim", latent.rotary_dim)):
        if size % 2:
            raise ModelError(f"{key} must be even, got {size}")
    return latent
