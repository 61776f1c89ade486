"""The sections `model` and `engine`: which weights a worker serves, and on what device."""

from typing import Literal, Self

from pydantic import Field, model_validator

from baton.config.section import Section

KVCacheDtype = Literal["auto", "bfloat16", "fp8"]
"""Values of `engine.kv_cache_dtype`."""


class ModelConfig(Section):
    """Which weights to serve."""

    path: str = Field("smollm2", min_length=1)
    """A Hugging Face folder, a GGUF file, or a name: `ORG/NAME[@REVISION]` or `ORG/NAME[@REVISION]:Q4_K_M` of the
    Hugging Face Hub, `s3://BUCKET/FOLDER`, `gs://BUCKET/FOLDER`, or `smollm2`. A named model is downloaded once to each
    host. A name of the Hub is resolved to one commit, which all workers load, now and after restarts."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights, activations and, unless `engine.kv_cache_dtype` says otherwise, the KV cache. `auto` on a
    CPU: bfloat16 if the CPU has AMX or AVX512-BF16, else float32, with KV in bfloat16 if the CPU has Baton's own
    kernels. `auto` on a GPU: the checkpoint's own 16-bit type, or else bfloat16. The command that starts the fleet
    decides for all workers."""
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = "auto"
    """How matrices are stored. `auto`: a quantized matrix keeps its number of bits if a kernel can multiply it in that
    form. On CPUs, Baton's own kernels, which need a C++ compiler, multiply the 4 to 8 bits of a GGUF file or
    checkpoint. On GPUs, kernels multiply 8-bit floats. All other matrices are in `dtype`. `none`: all matrices are in
    `dtype`. `int8`, `int4` (on CPUs): at most 8 or 4 bits, with a scale for every 32 inputs, quantized while loading;
    with `int4`, embeddings and the projection to logits have 8 bits. `fp8`: the layers' matrices are 8-bit floats
    (e4m3) with one scale per output. GPUs (only NVIDIA Ada, Hopper and newer) then also quantize the inputs, token by
    token. All workers must use the same value."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` makes random weights from config.json alone; they are the same in every process on the same kind of
    device."""


class EngineConfig(Section):
    """One worker's device, or devices."""

    device: Literal["cpu", "cuda"] = "cpu"
    tensor_parallel: int = Field(1, ge=1)
    """Number of ranks that share one worker's model. Each rank is a process with a device of its own; all are on one
    host. The number must divide the model's heads, KV heads and intermediate sizes. `cluster.prefill_tensor_parallel`
    and `cluster.decode_tensor_parallel` override it."""
    enable_expert_parallel: bool = False
    """Each rank holds whole experts of a mixture, instead of its share of every expert's columns, so that the number of
    ranks need not divide an expert's intermediate size. Attention and shared experts are divided in either case.
    `cluster.prefill_enable_expert_parallel` and `cluster.decode_enable_expert_parallel` override it."""
    rank_timeout_s: float = Field(60.0, gt=0.0)
    """A worker fails if one of its ranks waits this long for another rank."""
    progress_timeout_s: float = Field(120.0, gt=0.0)
    """A worker reports `hung` and ends if a step takes this long. The worker learns a shorter limit from its own steps:
    20 times the longest recent step, and more for a larger step, in proportion. This limit is at least 10 s on a CPU,
    and 60 s on a GPU, where a step may compile a kernel."""
    num_threads: int | None = Field(None, ge=1, le=4096)
    """Threads with which each rank computes on a CPU. If unset, the machine's cores are divided equally among all ranks
    of the fleet's workers there. `cluster.prefill_num_threads` and `cluster.decode_num_threads` override it."""
    kv_cache_memory_mib: int | None = Field(None, ge=1)
    """Size of each rank's KV pool; `scheduler.num_blocks` overrides it. If unset: on a CPU 1024, or 2048 if KV is
    float32; on a GPU, the part of `gpu_memory_utilization` that other processes, the weights, the largest step and the
    CUDA graphs leave free."""
    gpu_memory_utilization: float = Field(0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that may be in use once the worker runs, including memory that was in use before.
    Workers that share a GPU need `kv_cache_memory_mib`."""
    cuda_graphs: bool = True
    """Record decode steps and small steps with prompts as CUDA graphs when a worker starts, and replay them, so that
    the GPU need not wait for Python."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """`auto`: like `model.dtype`. One exception: `bfloat16` if `model.dtype`, left at its own `auto`, becomes float32
    on a CPU that has Baton's own kernels. `bfloat16`, on CPUs with `model.dtype: float32`: keys and values are rounded
    to 16 bits, and all arithmetic stays in float32. `fp8`: 8-bit floats (e4m3), after a division by the checkpoint's
    `k_scale` and `v_scale`, if it has them. With half as many bits, the same memory holds twice as many tokens, and a
    hand-over has half as many bytes. Prefill and decode workers must use the same value."""
    swap_space_mib: int = Field(256, ge=1)
    """With `scheduler.preemption: swap`: host memory for the KV of preempted requests, unless
    `scheduler.num_swap_blocks` says how much."""
    trace_dir: str | None = Field(None, min_length=1)
    """Folder for step traces: each start of a worker writes one file, WORKER-INCARNATION.jsonl, with every step of
    its scheduler. `baton trace` draws them. On a full disk, a worker runs without a trace. If unset: no traces."""
    trace_max_mib: int = Field(64, ge=1)
    """A worker stops writing its trace when the file reaches this size; the worker itself continues."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.device == "cpu":
            self.refuse_changed(("gpu_memory_utilization", "cuda_graphs"), "needs device 'cuda', not 'cpu'")
        if self.trace_dir is None:
            self.refuse_changed(("trace_max_mib",), "needs trace_dir")
        return self
