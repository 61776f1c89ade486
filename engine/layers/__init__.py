"""The layers that models are made of; knows no architecture."""

from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.paged_attention import PagedAttention
from engine.layers.rope import RotaryEmbedding

__all__ = ["Attention", "Linear", "PagedAttention", "RotaryEmbedding"]
