"""measure_memory: what a worker's steps take of a GPU, found out by running the largest of them; knows no KV yet."""

import gc

import torch

from engine.collectives import Collectives
from engine.device_parts import make_device_parts
from engine.graphs import CudaGraphs, decode_sizes
from engine.kv_cache import KVPool
from engine.layers.triton_attention import StepLimits
from engine.loader import LoadedModel
from engine.memory import DeviceMemory

NUM_MEASURED_GRAPHS = 2
"""The largest, whose memory all share, and the next, for what each costs besides."""


def free_memory(device: torch.device) -> int:
    """Bytes that nobody has, PyTorch's own reserve not counted."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free


def measure_memory(
    model: LoadedModel,
    block_size: int,
    limits: StepLimits,
    free_at_start: int,
    utilization: float,
    collectives: Collectives,
    *,
    uses_graphs: bool,
) -> DeviceMemory:
    """`free_at_start`: before the model was loaded. All ranks of a worker must call this together.

    Leaves nothing behind but compiled kernels, which count as activations.
    """
    device = model.device
    _, total = torch.cuda.mem_get_info(device)
    free_loaded = free_memory(device)
    pool = KVPool(2, model.kv_block_shape(block_size), device)
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    parts = make_device_parts(model, pool, limits, num_multiprocessors, collectives)
    parts.rehearse()
    torch.cuda.synchronize(device)
    free_rehearsed, _ = torch.cuda.mem_get_info(device)
    graphs = 0
    if uses_graphs:
        sizes = decode_sizes(limits.max_num_seqs)
        recorder = CudaGraphs()
        taken = []
        for size in sizes[::-1][:NUM_MEASURED_GRAPHS]:
            before, _ = torch.cuda.mem_get_info(device)
            parts.forward.record_decodes([size], recorder)
            torch.cuda.synchronize(device)
            after, _ = torch.cuda.mem_get_info(device)
            taken.append(max(0, before - after))
        graphs = taken[0] + (len(sizes) - 1) * taken[-1] if len(taken) > 1 else taken[0]
        del recorder
    del parts, pool
    free_memory(device)
    return DeviceMemory(
        total=total,
        used_by_others=total - free_at_start,
        weights=free_at_start - free_loaded,
        activations=free_loaded - free_rehearsed,
        graphs=graphs,
        utilization=utilization,
    )
