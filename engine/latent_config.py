"""LatentAttention: what a config.json says about multi-head latent attention; knows no tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import ModelError
from engine.config_values import count_of
from engine.families import Family
from engine.rope_config import RopeConfig, RopeType, mscale

MAX_GPU_RANK, MAX_GPU_ROTARY_DIM = 512, 64
"""The longest latent and rotated part on a GPU, which are DeepSeek's. Sums of longer ones would not fit registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """MLA (DeepSeek-V2, 2024): keys and values of all heads are projections of one vector of a token, its *latent*.

    A key is the projection's, and behind it a rotated part that all heads share. The cache holds latent and rotated
    part. Queries that are projected into the latent space attend to it as to one key, and its latent is the value.
    """

    rank: int
    """Numbers of a latent."""
    rotary_dim: int
    """Numbers of the rotated part of a query or key, the last ones."""
    plain_dim: int
    """Numbers of its other part."""
    value_dim: int
    query_rank: int | None
    """Queries are projections of one vector of so many numbers; None: of the hidden state."""
    is_interleaved: bool
    """Whether pairs that are rotated together are neighbours in the checkpoint."""

    @property
    def size(self) -> int:
        """Numbers in the cache of a token and layer."""
        return self.rank + self.rotary_dim

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query in the checkpoint."""
        return self.plain_dim + self.rotary_dim

    def scale(self, rope: RopeConfig | None) -> float:
        """Of scores. YaRN's attention temperature is here, as far as it is not in the rotation."""
        factor = 1.0
        if rope is not None and rope.rope_type is not RopeType.DEFAULT and rope.mscale_all_dim:
            factor = mscale(rope.factor, rope.mscale_all_dim) ** 2
        return factor * float(self.query_dim**-0.5)


def read_latent(config: Mapping[str, Any], family: Family) -> LatentAttention | None:
    """None for a family with keys and values of heads. ModelError names the key that is not supported."""
    if not family.is_deepseek:
        return None
    num_heads, num_kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if num_kv_heads not in (None, num_heads):
        raise ModelError(
            f"num_key_value_heads ({num_kv_heads}) must equal num_attention_heads ({num_heads}): heads share a latent"
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ModelError(f"{key} {config[key]!r:.80} is not supported for model_type {family.value!r}")
    is_interleaved = bool(config.get("rope_interleave", True)) or family is Family.DEEPSEEK_V2
    latent = LatentAttention(
        rank=count_of(config, "kv_lora_rank"),
        rotary_dim=count_of(config, "qk_rope_head_dim"),
        plain_dim=count_of(config, "qk_nope_head_dim"),
        value_dim=count_of(config, "v_head_dim"),
        query_rank=None if config.get("q_lora_rank") is None else count_of(config, "q_lora_rank"),
        is_interleaved=is_interleaved,
    )
    if latent.rotary_dim % 2:
        raise ModelError(f"qk_rope_head_dim must be even, got {latent.rotary_dim}")
    return latent
