"""read_kv_scales: reads a checkpoint's scales for keys and values in 8 bits; knows no layer."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

from baton.errors import ModelError
from engine.layers.scaled_attention import KVScale
from engine.loading.safetensors_index import CheckpointIndex, open_safetensors
from engine.model_config import check_kv_scales

ENDINGS = (".k_scale", ".v_scale", ".kv_scale")
"""Endings of the tensors' names: for keys, for values, and for both."""


def read_kv_scales(path: Path) -> dict[str, KVScale]:
    """The scales by the name of a layer's attention (`model.layers.0.self_attn`); only of layers with scales.

    ModelError names a tensor that is no valid scale, or an unsupported scheme. The supported scheme is 8-bit
    floats with one scale for a layer's keys, and one for its values.
    """
    check_kv_scales(path)
    index = CheckpointIndex.read(path)
    found: dict[str, dict[str, float]] = {}
    for name in sorted(index.names):
        if name.endswith(ENDINGS):
            heads, _, kind = name.rpartition(".")
            if not heads.endswith(".self_attn"):
                raise ModelError(
                    f"{path}: tensor {name} scales keys or values, but only self_attn.k_scale, self_attn.v_scale and "
                    "self_attn.kv_scale are supported; set engine.kv_cache_dtype to 'auto', which needs no scales"
                )
            found.setdefault(heads, {})[kind] = _value(index, name)
    return {heads: _of_layer(path, heads, values) for heads, values in found.items()}


def digest_of(scales: Mapping[str, KVScale]) -> str | None:
    """Identifies the scales, as a part of the model's digest; None without scales."""
    if not scales:
        return None
    lines = "\n".join(f"{heads} {scale.key!r} {scale.value!r}" for heads, scale in sorted(scales.items()))
    return f"kv{hashlib.sha256(lines.encode()).hexdigest()[:16]}"


def _value(index: CheckpointIndex, name: str) -> float:
    stored = index.stored(name)
    if math.prod(stored.shape) != 1:
        raise ModelError(
            f"{stored.file}: tensor {name} has shape {list(stored.shape)}, but only one scale for a layer is "
            "supported; set engine.kv_cache_dtype to 'auto', which needs no scales"
        )
    with open_safetensors(stored.file) as handle:
        value = float(handle.get_tensor(name).float().item())
    if not 0.0 < value < math.inf:
        raise ModelError(f"{stored.file}: tensor {name} is {value:g}, but a scale must be positive")
    return value


def _of_layer(path: Path, heads: str, values: Mapping[str, float]) -> KVScale:
    if values.keys() == {"k_scale", "v_scale"}:
        return KVScale(values["k_scale"], values["v_scale"])
    if values.keys() == {"kv_scale"}:
        return KVScale(values["kv_scale"], values["kv_scale"])
    raise ModelError(
        f"{path}: {heads} has {' and '.join(values)}; there must be k_scale and v_scale, or kv_scale alone"
    )
