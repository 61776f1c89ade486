"""measure: how much memory and time a model's steps take on a GPU, measured by running the largest steps.

Runs before there is a KV pool, and leaves only compiled kernels behind, which count as activations.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from engine.batch import StepLimits
from engine.gpu.device_parts import DeviceParts, make_device_parts
from engine.gpu.graphs import CudaGraphs, Recorder, decode_sizes
from engine.gpu.memory import DeviceMemory
from engine.gpu.product_timer import gpu_seconds
from engine.kv_cache import KVPool
from engine.loading.loader import LoadedModel

logger = logging.getLogger(__name__)

NUM_MEASURED_GRAPHS = 2
"""How many graphs of each kind are measured: the largest, whose memory all share, and the next one, which shows how
much memory each further graph needs."""
COLLECTIVES_BYTES = 512 * 2**20
"""Memory that is reserved for NCCL, which allocates it later, when the ranks connect."""
CHUNKS = (512, 1024, 2048, 4096, 8192)
ENOUGH = 0.95
"""A chunk with this share of the best throughput is fast enough. Smaller chunks are handed over sooner, and delay
running requests less."""
NUM_TIMED = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one rank's GPU."""

    memory: DeviceMemory
    chunk: int | None
    """Prompt tokens per step that keep the GPU busy; at most those of the largest step. None: not measured."""


def measure(
    model: LoadedModel,
    block_size: int,
    limits: StepLimits,
    utilization: float,
    *,
    uses_graphs: bool,
    wants_chunk: bool,
) -> Measured:
    """Measures this rank's GPU. The model's collectives need not be connected."""
    device = model.device
    _, total = torch.cuda.mem_get_info(device)
    free_loaded = free_memory(device)
    weights = torch.cuda.memory_reserved(device)
    with model.collectives.silent():
        pool = KVPool(2, model.kv_block_shape(block_size), device)
        parts = make_device_parts(model, pool, limits)
        torch.cuda.reset_peak_memory_stats(device)
        parts.rehearse()
        most_reserved = torch.cuda.max_memory_reserved(device)
        throughput = partial(_throughput, parts, uses_graphs=uses_graphs)
        chunk = chosen_chunk(limits, throughput) if wants_chunk else None
        parts.forward.record((), CudaGraphs(), has_chunks=True)
        # When recording begins, the memory of the steps before is released. The memory that recording itself uses
        # counts as the graphs' memory.
        free_memory(device)
        returned = most_reserved - torch.cuda.memory_reserved(device)
        activations = free_loaded - _free_now(device) + returned
        graphs = graphs_bytes(parts, CudaGraphs(), lambda: _free_now(device)) if uses_graphs else 0
    if model.collectives.size > 1:
        graphs += COLLECTIVES_BYTES
    del parts, pool
    free_memory(device)
    memory = DeviceMemory(
        total=total,
        used_by_others=total - free_loaded - weights,
        weights=weights,
        activations=activations,
        graphs=graphs,
        utilization=utilization,
    )
    return Measured(memory, chunk)


def free_memory(device: torch.device) -> int:
    """Free bytes, after PyTorch has released what it cached."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    return _free_now(device)


def graphs_bytes(parts: DeviceParts, recorder: Recorder, free_now: Callable[[], int]) -> int:
    """The bytes of all graphs; `free_now` returns the device's free bytes.

    Records the two largest graphs of each kind, and keeps them until all are measured. The second graph
    shares the memory of the largest one. The bytes that it needs in addition are assumed for every further
    graph of its kind.
    """

    def of_kind(sizes: Sequence[int], *, has_chunks: bool) -> int:
        free, measured = [free_now()], sizes[-NUM_MEASURED_GRAPHS:]
        parts.forward.record(measured, recorder, lambda _: free.append(free_now()), has_chunks=has_chunks)
        taken = [max(0, before - after) for before, after in pairwise(free)]
        return sum(taken) + (len(sizes) - len(taken)) * taken[-1]

    decodes = decode_sizes(parts.limits.max_num_seqs)
    return of_kind(parts.mixed_sizes, has_chunks=True) + of_kind(decodes, has_chunks=False)


def smallest_fast_chunk(throughputs: Sequence[tuple[int, float]]) -> int:
    """From (chunk, tokens a second), the smallest chunk that is nearly as fast as the best."""
    best = max(throughput for _, throughput in throughputs)
    return min(chunk for chunk, throughput in throughputs if throughput >= ENOUGH * best)


def chosen_chunk(limits: StepLimits, throughput: Callable[[int], float]) -> int:
    """The smallest chunk that keeps the GPU busy; `throughput` measures one chunk size, in tokens a second.

    Times vary, so two starts may choose differently: the log shows the throughputs.
    """
    most = min(limits.max_num_batched_tokens, limits.max_model_len)
    chunks = [chunk for chunk in CHUNKS if chunk < most]
    throughputs = [(chunk, throughput(chunk)) for chunk in (*chunks, most)]
    chosen = smallest_fast_chunk(throughputs)
    found = ", ".join(f"{chunk}: {rate:,.0f}" for chunk, rate in throughputs)
    logger.info("chunks of %d tokens keep the GPU busy (tokens/s by chunk: %s)", chosen, found)
    return chosen


def _free_now(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    free, _ = torch.cuda.mem_get_info(device)
    return free


def _throughput(parts: DeviceParts, chunk: int, *, uses_graphs: bool) -> float:
    """Tokens a second of the forward pass of one chunk: the median of a few runs. The pass replays a graph if a worker
    would."""
    recorded = (chunk,) if uses_graphs and chunk in parts.mixed_sizes else ()
    parts.forward.record(recorded, CudaGraphs(), has_chunks=True)
    _, *times_s = gpu_seconds(lambda: parts.forward.rehearse(1, chunk), NUM_TIMED + 1)
    return chunk / median(times_s)
