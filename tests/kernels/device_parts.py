"""A tiny random model with its pool and device parts, as a GPU worker makes them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import ModelConfig
from engine.batch import StepLimits
from engine.gpu.device_parts import DeviceParts, make_device_parts
from engine.kv_cache import KVPool
from engine.layers.triton_backend import TritonBackend
from engine.loading.loader import LoadedModel, load_model
from tests.factories.models import make_model_dir

SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 80,
}
"""Of a config.json: an interpreter takes its time by the program."""

OF_PADDED_ROWS = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
"""Marks for whole engines. Rows that pad a step contain arbitrary memory; their results are not used."""


def make_parts(
    folder: Path,
    device: torch.device,
    limits: StepLimits,
    *,
    dtype: str = "float32",
    quantization: str = "auto",
    fp8_cache: bool = False,
    num_blocks: int = 8,
    block_size: int = 16,
    num_multiprocessors: int = 2,
    architecture: str = "llama",
    **overrides: Any,
) -> tuple[LoadedModel, DeviceParts, KVPool]:
    """`overrides`: replaced keys of the model's config.json."""
    path = make_model_dir(folder / "model", architecture, **(SMALL | overrides))
    config = ModelConfig.model_validate({"dtype": dtype, "quantization": quantization})
    model = load_model(config, path, device, TritonBackend(), kv_cache_dtype="fp8" if fp8_cache else "auto")
    pool = KVPool(num_blocks, model.kv_block_shape(block_size), device)
    return model, make_device_parts(model, pool, limits, num_multiprocessors), pool
