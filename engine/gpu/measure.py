"""measure: what the steps of a model take of a GPU's memory and time, found out by running the largest of them.

Runs before there is a KV pool, and leaves nothing behind but compiled kernels, which count as activations.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.gpu.device_parts import DeviceParts, make_device_parts
from engine.gpu.graphs import CudaGraphs, decode_sizes, mixed_sizes
from engine.gpu.memory import DeviceMemory
from engine.kv_cache import KVPool
from engine.loading.loader import LoadedModel
from engine.step_limits import StepLimits

NUM_MEASURED_GRAPHS = 2
"""Of each kind: the largest, whose memory all share, and the next, for what each costs besides."""
COLLECTIVES_BYTES = 512 * 2**20
"""What NCCL may take when ranks connect, which comes later."""
CHUNKS = (512, 1024, 2048, 4096, 8192)
ENOUGH = 0.95
"""Of the best throughput. A smaller chunk is handed over sooner, and lets running requests wait less."""
NUM_TIMED = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """One rank's GPU."""

    memory: DeviceMemory
    chunk: int
    """Prompt tokens a step that are enough to keep it busy; no more than the largest step that was asked for."""


def measure(
    model: LoadedModel,
    block_size: int,
    limits: StepLimits,
    free_at_start: int,
    utilization: float,
    *,
    uses_graphs: bool,
) -> Measured:
    """`free_at_start`: before the model was loaded. The model's collectives need not be connected."""
    device = model.device
    _, total = torch.cuda.mem_get_info(device)
    free_loaded = free_memory(device)
    with model.collectives.silent():
        pool = KVPool(2, model.kv_block_shape(block_size), device)
        parts = make_device_parts(model, pool, limits)
        parts.rehearse()
        chunk = _choose_chunk(parts, limits)
        torch.cuda.synchronize(device)
        free_rehearsed, _ = torch.cuda.mem_get_info(device)
        graphs = _graphs_bytes(parts, limits, device) if uses_graphs else 0
    if model.collectives.size > 1:
        graphs += COLLECTIVES_BYTES
    del parts, pool
    free_memory(device)
    memory = DeviceMemory(
        total=total,
        used_by_others=total - free_at_start,
        weights=free_at_start - free_loaded,
        activations=free_loaded - free_rehearsed,
        graphs=graphs,
        utilization=utilization,
    )
    return Measured(memory, chunk)


def free_memory(device: torch.device) -> int:
    """Bytes that nobody has, and that PyTorch does not keep for later."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free


def smallest_enough(throughputs: Sequence[tuple[int, float]]) -> int:
    """Of (chunk, tokens a second), the smallest chunk that is nearly as fast as any."""
    best = max(throughput for _, throughput in throughputs)
    return min(chunk for chunk, throughput in throughputs if throughput >= ENOUGH * best)


def _choose_chunk(parts: DeviceParts, limits: StepLimits) -> int:
    most = min(limits.max_num_batched_tokens, limits.max_model_len)
    chunks = [chunk for chunk in CHUNKS if chunk < most]
    return smallest_enough([(chunk, _throughput(parts, chunk)) for chunk in (*chunks, most)])


def _throughput(parts: DeviceParts, chunk: int) -> float:
    """Tokens a second of the forward pass of one chunk; the median of a few."""
    times_ms: list[float] = []
    for _ in range(NUM_TIMED + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        parts.forward.rehearse(1, chunk)
        end.record()
        end.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return chunk / sorted(times_ms[1:])[NUM_TIMED // 2] * 1e3


def _graphs_bytes(parts: DeviceParts, limits: StepLimits, device: torch.device) -> int:
    """Both kinds share their memory: what the largest of each take, and for every other what the last one took."""
    decodes, mixed = decode_sizes(limits.max_num_seqs), mixed_sizes(limits.max_num_batched_tokens)
    recorder = CudaGraphs()
    taken = []
    for size, has_chunks in [
        *((size, True) for size in mixed[::-1][:NUM_MEASURED_GRAPHS]),
        *((size, False) for size in decodes[::-1][:NUM_MEASURED_GRAPHS]),
    ]:
        before, _ = torch.cuda.mem_get_info(device)
        parts.forward.record([size], recorder, has_chunks=has_chunks)
        torch.cuda.synchronize(device)
        after, _ = torch.cuda.mem_get_info(device)
        taken.append(max(0, before - after))
    return sum(taken) + (len(decodes) + len(mixed) - len(taken)) * taken[-1]
