"""The data types that `model.dtype: auto` means; chosen once, when a fleet or a single worker is configured.

Imports no torch, since the command that starts a fleet computes nothing itself.
"""

import os
from pathlib import Path
from typing import NamedTuple

from baton.config import BatonConfig, KVCacheDtype
from engine.model_config import read_json
from engine.native.compilers import may_have_kernels
from engine.native.instructions import cpu_flags


class ChosenDtype(NamedTuple):
    """The data types of a fleet, and the reason for them; no reason if the configuration names `model.dtype`."""

    dtype: str
    kv_cache_dtype: KVCacheDtype = "auto"
    """`auto`: the same as `dtype`."""
    reason: str = ""

    @property
    def of_kv(self) -> str:
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def __str__(self) -> str:
        both = self.dtype if self.of_kv == self.dtype else f"{self.dtype}, KV in {self.of_kv}"
        return f"{both} (auto: {self.reason})" if self.reason else both


def choose_dtype(config: BatonConfig, model_path: Path) -> ChosenDtype:
    """The data types for a model's folder: on a CPU, for this machine; on GPUs, for any machine."""
    if config.model.dtype != "auto":
        chosen = ChosenDtype(config.model.dtype)
    elif config.engine.device == "cuda":
        chosen = _for_gpu(model_path)
    else:
        chosen = _for_cpu(cpu_flags(), may_have_kernels(os.environ))
    if config.engine.kv_cache_dtype == "auto":
        return chosen
    return chosen._replace(kv_cache_dtype=config.engine.kv_cache_dtype)


def with_dtype(config: BatonConfig, chosen: ChosenDtype) -> BatonConfig:
    """The same configuration, with these data types instead of `auto`."""
    model = config.model.with_values("model", dtype=chosen.dtype)
    changed = config.model_copy(update={"model": model})
    if chosen.kv_cache_dtype == config.engine.kv_cache_dtype:
        return changed
    engine = config.engine.with_values("engine", kv_cache_dtype=chosen.kv_cache_dtype)
    return changed.model_copy(update={"engine": engine})


def with_chosen_dtype(config: BatonConfig, model_path: Path) -> BatonConfig:
    """The same configuration, with the data types that `auto` means on this machine, for this model."""
    return with_dtype(config, choose_dtype(config, model_path))


def dtype_of(config: BatonConfig) -> ChosenDtype:
    """The data types that a configuration names, after they were chosen."""
    return ChosenDtype(config.model.dtype, config.engine.kv_cache_dtype)


def _for_cpu(flags: frozenset[str], has_kernels: bool) -> ChosenDtype:
    """bfloat16 if the CPU has instructions for its products, else float32.

    Without such instructions, products of float32 are faster. Even then, a checkpoint's weights stay in 16 bits
    (`NativeLinear.of_floats`). If Baton has kernels for this CPU, KV is bfloat16: the kernels widen keys and values
    as they read them, so they read half the bytes. torch would make widened copies."""
    for flag, name in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-BF16")):
        if flag in flags:
            return ChosenDtype("bfloat16", reason=f"this CPU has {name}")
    kv_cache_dtype: KVCacheDtype = "bfloat16" if has_kernels else "auto"
    return ChosenDtype("float32", kv_cache_dtype, "this CPU has neither AMX nor AVX512-BF16")


def _for_gpu(model_path: Path) -> ChosenDtype:
    """A type of 16 bits, since every supported GPU computes several times as fast with 16 bits as with 32."""
    config = read_json(model_path / "config.json")
    own = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if own in ("bfloat16", "float16"):
        return ChosenDtype(own, reason="the checkpoint's own")
    return ChosenDtype(
        "bfloat16", reason=f"the checkpoint's is {own}" if own else "the checkpoint names none"
    )
