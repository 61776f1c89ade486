"""The sections `model` and `engine`: which weights a worker serves, and on what device."""

from typing import Literal, Self

from pydantic import Field, model_validator

from baton.config.section import Section


class ModelConfig(Section):
    """Which weights to serve."""

    path: str = "smollm2"
    """A Hugging Face folder, or the name of a model that Baton knows how to get (`smollm2`)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of weights, activations and, unless `engine.kv_cache_dtype` says otherwise, the KV cache."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: the layers' matrices become 8-bit floats (e4m3) with a scale for each output while they are loaded,
    which halves their memory; embeddings, norms and the projection to logits stay as they are. On GPUs with 8-bit
    matrix units (NVIDIA Ada, Hopper and newer) their inputs are quantized too, token by token. All workers need the
    same."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: random weights from config.json alone, the same ones in every process on the same kind of device."""


class EngineConfig(Section):
    """One worker's device, or devices."""

    device: Literal["cpu", "cuda"] = "cpu"
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share one worker's model, each a process with a device of its own, all on one host. It must divide the
    model's KV heads. `cluster.prefill_tensor_parallel` and `cluster.decode_tensor_parallel` win over it."""
    rank_timeout_s: float = Field(60.0, gt=0.0)
    """A worker fails if one of its ranks waits this long for another one."""
    num_threads: int | None = Field(None, ge=1)
    """Threads of a rank's math library on CPU; None shares every core of the machine among a worker's ranks."""
    kv_cache_memory_mib: int | None = Field(None, ge=1)
    """Size of each rank's KV pool; `scheduler.num_blocks`, where set, wins. None: 1024 on a CPU; on a GPU, what the
    largest step leaves of `gpu_memory_utilization`."""
    gpu_memory_utilization: float = Field(0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that a worker, with everything that was there before it, may fill. Workers that share a
    GPU need `kv_cache_memory_mib`."""
    cuda_graphs: bool = True
    """Record steps that consist of decodes when a worker starts, and replay them: the GPU need not wait for Python."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """`auto`: the model's. `fp8`: 8-bit floats (e4m3) without scales, so twice the tokens in the same memory, and half
    the bytes to hand over. Prefill and decode workers need the same."""
    swap_space_mib: int = Field(256, ge=1)
    """Host memory for preempted requests' KV, taken only if `scheduler.preemption` can use it."""
    trace_dir: str | None = Field(None, min_length=1)
    """A folder for one file per worker and start, WORKER-INCARNATION.jsonl, with every step of its scheduler; `baton
    trace` draws them. None: nothing is written."""
    trace_max_mib: int = Field(64, ge=1)
    """A worker's trace ends when its file is this large; the worker goes on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in ("gpu_memory_utilization", "cuda_graphs"):
            if self.device == "cpu" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} ({getattr(self, key)}) needs device 'cuda', not 'cpu'")
        return self
