"""Scales of keys and values in 8 bits beside the GPU's kernels, which do not know them.

A model with scales is compared with one whose weights have them. The scales are powers of two, so the numbers are equal
bit for bit: also in Triton's interpreter, which rounds to 8 bits in its own way.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config import ModelConfig
from engine.batch import StepLimits
from engine.gpu.device_parts import make_device_parts
from engine.kv_cache import KVPool
from engine.layers.scaled_attention import KVScale
from engine.layers.triton_backend import TritonBackend
from engine.loading.loader import load_model
from engine.pipeline import StreamPipeline
from tests.factories.models import make_model_dir
from tests.kernels.device_parts import OF_PADDED_ROWS, SMALL
from tests.kernels.test_device_engine import Answers, answers_of, make_config
from tests.unit.engine.test_kv_scales import add_scales

pytestmark = OF_PADDED_ROWS

HEADS = "model.layers.0.self_attn"
SCALE = KVScale(2.0**-8, 2.0**-9)
"""So small that a forgotten one would change every answer."""


def scale_weights(folder: Path, **factors: float) -> None:
    """Multiplies matrices and norms of the attention."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, factor in factors.items():
        tensors[f"{HEADS}.{name}.weight"] *= factor
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("architecture", "overrides", "to_queries", "to_keys"),
    [
        pytest.param("llama", {}, "q_proj", "k_proj", marks=pytest.mark.by_hand),
        ("qwen3", {"head_dim": 32}, "q_norm", "k_norm"),
    ],
    ids=["llama", "normed heads"],
)
def test_scales_are_as_good_as_scaled_weights(
    tmp_path: Path,
    device: torch.device,
    architecture: str,
    overrides: dict[str, Any],
    to_queries: str,
    to_keys: str,
) -> None:
    folders = [make_model_dir(tmp_path / name, architecture, **(SMALL | overrides)) for name in ("a", "b")]
    add_scales(folders[0], {HEADS: SCALE})
    factors = {
        to_queries: SCALE.key,
        to_keys: 1 / SCALE.key,
        "v_proj": 1 / SCALE.value,
        "o_proj": SCALE.value,
    }
    scale_weights(folders[1], **factors)
    scaled, expected = (_answers(folder, device) for folder in folders)
    assert scaled == expected


def _answers(folder: Path, device: torch.device) -> Answers:
    model = load_model(ModelConfig(dtype="float32"), folder, device, TritonBackend(), kv_cache_dtype="fp8")
    pool = KVPool(16, model.kv_block_shape(16), device)
    parts = make_device_parts(model, pool, StepLimits(4, 8, 64), num_multiprocessors=2)
    return answers_of(StreamPipeline(parts.runner(pool), is_async=False), make_config(16, 16))
