"""The data type that `model.dtype: auto` means; chosen once, when a fleet or a single worker is configured.

Imports no torch, since the command that starts a fleet computes nothing itself.
"""

from pathlib import Path
from typing import NamedTuple

from baton.config import BatonConfig
from engine.model_config import read_json
from engine.native.instructions import cpu_flags


class ChosenDtype(NamedTuple):
    """A data type, and the reason for it; no reason if the configuration names the type."""

    dtype: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.dtype} (auto: {self.reason})" if self.reason else self.dtype


def choose_dtype(config: BatonConfig, model_path: Path) -> ChosenDtype:
    """The data type for a model's folder: on a CPU, for this machine; on GPUs, for any machine."""
    if config.model.dtype != "auto":
        return ChosenDtype(config.model.dtype)
    if config.engine.device == "cuda":
        return _for_gpu(model_path)
    return _for_cpu(cpu_flags())


def with_dtype(config: BatonConfig, dtype: str) -> BatonConfig:
    """The same configuration, with this data type instead of `auto`."""
    model = config.model.with_values("model", dtype=dtype)
    return config.model_copy(update={"model": model})


def with_chosen_dtype(config: BatonConfig, model_path: Path) -> BatonConfig:
    """The same configuration without `auto`."""
    return with_dtype(config, choose_dtype(config, model_path).dtype)


def _for_cpu(flags: frozenset[str]) -> ChosenDtype:
    """bfloat16 if the CPU has instructions for its products, else float32.

    Without such instructions, products of float32 are faster. They keep a checkpoint's weights in 16 bits,
    too (`NativeLinear.of_floats`)."""
    for flag, name in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-BF16")):
        if flag in flags:
            return ChosenDtype("bfloat16", f"this CPU has {name}")
    return ChosenDtype("float32", "this CPU has neither AMX nor AVX512-BF16")


def _for_gpu(model_path: Path) -> ChosenDtype:
    """A type of 16 bits: every supported GPU computes several times as fast with 16 bits as with 32."""
    config = read_json(model_path / "config.json")
    own = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if own in ("bfloat16", "float16"):
        return ChosenDtype(own, "the checkpoint's own")
    return ChosenDtype("bfloat16", f"the checkpoint's is {own}" if own else "the checkpoint names none")
