"""The layers that models are made of; knows no architecture."""

from engine.layers.attention import Attention, HeadNorm
from engine.layers.backend import Backend, LinearLayer
from engine.layers.linear import Linear
from engine.layers.paged_attention import PagedAttention
from engine.layers.rope import RotaryEmbedding
from engine.layers.torch_backend import TorchBackend

__all__ = [
    "Attention",
    "Backend",
    "HeadNorm",
    "Linear",
    "LinearLayer",
    "PagedAttention",
    "RotaryEmbedding",
    "TorchBackend",
]
