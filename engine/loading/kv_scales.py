"""read_kv_scales: by which scales a checkpoint's keys and values are to be divided in 8 bits; knows no layer."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

from baton.errors import ModelError
from engine.layers.scaled_attention import KVScale
from engine.loading.safetensors_index import CheckpointIndex, open_safetensors
from engine.model_config import read_json
from engine.quantization_config import check_kv_cache_scheme

ENDINGS = (".k_scale", ".v_scale", ".kv_scale")
"""Of the tensors' names: for keys, for values, and for both."""


def read_kv_scales(path: Path) -> dict[str, KVScale]:
    """By the name of a layer's attention (`model.layers.0.self_attn`); a layer without scales is missing.

    ModelError names a tensor that is no such scale, or a scheme for KV other than one 8-bit float scale for a tensor.
    """
    check_kv_cache_scheme(read_json(path / "config.json"))
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
    """Identifies them, for the model's digest; None without scales."""
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
        f"{path}: {heads} has {' and '.join(values)}; it needs k_scale and v_scale, or kv_scale alone"
    )
