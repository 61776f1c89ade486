"""weight_memory: memory for packed weights, in huge pages where Linux has them.

Every step reads all weights. With pages of 4 KiB, the processor spends much of this time on page tables, above all in
a virtual machine, whose pages are translated twice.
"""

import mmap
from contextlib import suppress
from threading import Lock

import torch

CHUNK_BYTES = 32 * 2**20
"""Small weights share a chunk of this size; larger weights have one of their own."""
_ALIGNMENT = 64

_NOTHING = torch.empty(0, dtype=torch.uint8)
_chunk = _NOTHING
"""The unused part of the latest chunk."""
_lock = Lock()
"""Protects `_chunk`: the ranks of a test load their weights in threads of one process."""


def weight_memory(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], aligned to 64 bytes. The memory of a chunk is freed with the last tensor in it."""
    global _chunk
    if num_bytes > CHUNK_BYTES:
        return _new_chunk(num_bytes)
    size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    with _lock:
        if size > len(_chunk):
            _chunk = _new_chunk(CHUNK_BYTES)
        taken, rest = _chunk[:num_bytes], _chunk[size:]
        _chunk = rest if len(rest) > 0 else _NOTHING  # an empty view would keep the whole chunk in memory
    return taken


def _new_chunk(size: int) -> torch.Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # this Linux has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
