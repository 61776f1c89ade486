"""KVPool: the paged KV cache of one rank, a tensor in which a block is one contiguous span; knows no request.

Axis letters, also in the fingerprint's layout: N blocks, L layers, K the pair (keys, values), H kv heads, T
tokens of a block, D head dimension. docs/decisions/0001-kv-block-layout.md explains why heads come before
tokens.

A pool of latents has one vector for each token and layer. K and H are 1, and D is the length of the vector
(docs/decisions/0023-a-block-of-latents.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import ConfigError
from baton.kv import HEADS_LAYOUT, LATENT_LAYOUT, PROTOCOL_VERSION, KVFingerprint
from baton.kv_groups import ONE_GROUP, KVGroups
from kv_transfer import CudaMemory, CudaOutOfMemory, DeviceBlocks, pinned_array


@dataclass(frozen=True, slots=True)
class KVBlockShape:
    """The contents of a block: `block_size` tokens of every layer of a KV group."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    is_latent: bool = False
    """Whether each token has one vector, which is the key and the value of all heads. Every rank stores this
    vector."""

    def __post_init__(self) -> None:
        assert not self.is_latent or self.num_kv_heads == 1, f"{self.num_kv_heads} heads of a latent"

    @property
    def num_planes(self) -> int:
        """How many tensors a layer stores: 2 (keys and values), or 1 (latents)."""
        return 1 if self.is_latent else 2

    @property
    def dimensions(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, self.num_planes, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def size_bytes(self) -> int:
        num_elements: int = int(np.prod(self.dimensions))
        return num_elements * self.dtype.itemsize

    @property
    def max_blocks_on_gpu(self) -> int:
        """The most blocks of a pool on a GPU: its bulk copy engine (TMA) counts keys and values in 32 bits."""
        return (2**31 - 1) // int(np.prod(self.dimensions[:-1]))


class KVPool:
    """Blocks 0 .. num_blocks - 1; block 0 is the null block. Memory reads as zeros until written.

    On Linux, the pages of a CPU pool use memory only once they are written. The pool keeps a reference to
    memory that it was given, but never frees it. The owner of a CudaMemory frees it when nothing uses pool
    and connector any more.
    """

    def __init__(
        self,
        num_blocks: int,
        shape: KVBlockShape,
        device: torch.device,
        memory: npt.NDArray[np.uint8] | CudaMemory | None = None,
    ) -> None:
        """`memory`: zeroed memory for the pool, an array on a CPU, a CudaMemory on a GPU.

        Other workers can read this memory. None: the pool allocates its own memory.
        """
        assert num_blocks >= 2, f"a pool of {num_blocks} blocks has none besides the null block"
        self.num_blocks = num_blocks
        self.shape = shape
        self._memory = memory
        flat = _flat(num_blocks * shape.size_bytes, device, memory)
        self.blocks_NLKHTD = flat.view(shape.dtype).view(num_blocks, *shape.dimensions)
        # torch supports bytes, but not 8-bit floats, in every operation on every device.
        is_byte = shape.dtype.itemsize == 1
        self._bits_NLKHTD = self.blocks_NLKHTD.view(torch.uint8) if is_byte else self.blocks_NLKHTD
        self.layers = tuple(LayerView(self.blocks_NLKHTD, layer) for layer in range(shape.num_layers))

    def block_bytes(self) -> npt.NDArray[np.uint8] | DeviceBlocks:
        """The pool's memory, as the connector needs it: DeviceBlocks on a GPU, an array [num_blocks, bytes of a block]
        on a CPU."""
        if self.blocks_NLKHTD.device.type == "cuda":
            assert isinstance(self._memory, CudaMemory), "hand-overs from a GPU need a pool in a CudaMemory"
            return DeviceBlocks(self._memory, self.shape.size_bytes)
        flat = self.blocks_NLKHTD.view(self.num_blocks, -1).view(torch.uint8)
        array: npt.NDArray[np.uint8] = flat.numpy()
        return array

    def fingerprint(
        self, model_digest: str, num_ranks: int = 1, groups: KVGroups = ONE_GROUP
    ) -> KVFingerprint:
        """What another worker's pool must have in common with this pool to exchange KV.

        `num_ranks`: how many ranks the worker has. Their pools store different heads, or the same latents.
        """
        shape = self.shape
        return KVFingerprint(
            protocol_version=PROTOCOL_VERSION,
            model=model_digest,
            dtype=str(shape.dtype).removeprefix("torch."),
            layout=LATENT_LAYOUT if shape.is_latent else HEADS_LAYOUT,
            num_layers=shape.num_layers * groups.num_groups,
            num_kv_heads=1 if shape.is_latent else shape.num_kv_heads * num_ranks,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            num_ranks=num_ranks,
            groups=groups,
        )

    def slot_rows(self, slots_T: torch.Tensor) -> torch.Tensor:
        """The rows of tokens' keys and values: indices into `LayerView.slot_rows_RD` of any layer.

        `slots_T` is block id x block size + offset. The result is flat over (token, key or value, kv head). A
        fused projection computes keys and values in the same order.
        """
        num_layers, num_planes, num_heads, block_size, _ = self.shape.dimensions
        rows_per_block = num_layers * num_planes * num_heads * block_size
        first_T = slots_T // block_size * rows_per_block + slots_T % block_size
        per_head = torch.arange(num_planes * num_heads, device=slots_T.device) * block_size
        return (first_T.unsqueeze(-1) + per_head).flatten()

    def block_rows(self, block_ids_BM: torch.Tensor) -> torch.Tensor:
        """The rows of B padded tables of M blocks: indices into `LayerView.block_rows_RX` of any layer.

        The result is flat over (key or value, table, kv head, block), so the gathered rows are a tensor
        [K, B, H, M x T, D] without a copy.
        """
        num_layers, num_planes, num_heads, _, _ = self.shape.dimensions
        num_rows = num_planes * num_heads
        first_BM = block_ids_BM * (num_layers * num_rows)
        per_head = torch.arange(num_rows, device=block_ids_BM.device).view(num_planes, 1, num_heads, 1)
        return (first_BM[None, :, None, :] + per_head).flatten()

    def clear_from(self, block_id: int, offset: int) -> None:
        """Zeroes the slots of a block from `offset` on, in every layer."""
        self._bits_NLKHTD[block_id, :, :, :, offset:].zero_()


def _flat(
    num_bytes: int, device: torch.device, memory: npt.NDArray[np.uint8] | CudaMemory | None
) -> torch.Tensor:
    """A tensor uint8 [num_bytes]: a view of `memory`, or new memory if `memory` is None."""
    if memory is None:
        return _zeros(num_bytes, device)
    assert memory.nbytes >= num_bytes, (
        f"{num_bytes} bytes of blocks do not fit {memory.nbytes} bytes of memory"
    )
    if isinstance(memory, CudaMemory):
        assert device == torch.device("cuda", memory.driver.device), f"the memory is not on {device}"
        return torch.as_tensor(memory, device=device)[:num_bytes]
    assert device.type == "cpu", f"an array cannot be memory of {device}"
    return torch.from_numpy(memory[:num_bytes])


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU numpy makes them from pages that were never touched; torch would write every page."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(num_bytes, np.uint8))
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


class LayerView:
    """One layer's part of all blocks, as rows of memory of two sizes.

    Both views begin at the layer's part of block 0, so the same row indices are valid for every layer.
    """

    def __init__(self, blocks_NLKHTD: torch.Tensor, layer: int) -> None:
        _, num_layers, num_planes, num_heads, block_size, head_dim = blocks_NLKHTD.shape
        assert 0 <= layer < num_layers
        rows_before = layer * num_planes * num_heads
        self.block_rows_RX = blocks_NLKHTD.view(-1, block_size * head_dim)[rows_before:]
        """A row: one block's keys or values of one head, `block_size * head_dim` elements."""
        self.slot_rows_RD = blocks_NLKHTD.view(-1, head_dim)[rows_before * block_size :]
        """A row: one token's key or value of one head."""


def copy_one_by_one(
    source_NB: torch.Tensor, target_MB: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    """Copies each pair of blocks with its own call, which is good for large blocks; a `CopyBlocks`."""
    for source, target in pairs:
        target_MB[target].copy_(source_NB[source], non_blocking=True)


CopyBlocks = Callable[[torch.Tensor, torch.Tensor, Sequence[tuple[int, int]]], None]
"""For each pair, copies block pair[0] of the first tensor to block pair[1] of the second tensor. Both tensors
are uint8 [blocks, bytes of a block]. On an asynchronous device the call only queues the copies."""


class HostBlocks:
    """Blocks of host memory for the KV of preempted requests; pinned memory if the pool is on a GPU."""

    def __init__(self, num_blocks: int, pool: KVPool, copy: CopyBlocks = copy_one_by_one) -> None:
        """Raises ConfigError if the memory of `num_blocks` blocks cannot be pinned."""
        self._pool_NB = pool.blocks_NLKHTD.view(pool.num_blocks, -1).view(torch.uint8)
        num_bytes = num_blocks * pool.shape.size_bytes
        self._host_MB = host_memory(num_bytes, self._pool_NB.device).view(num_blocks, pool.shape.size_bytes)
        self._copy = copy

    def swap(self, swap_out: Sequence[tuple[int, int]], swap_in: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks: first (block, host block) pairs out, then (host block, block) pairs in."""
        if swap_out:
            self._copy(self._pool_NB, self._host_MB, swap_out)
        if swap_in:
            self._copy(self._host_MB, self._pool_NB, swap_in)


def host_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Host memory for copies to and from the device: uint8 [num_bytes]."""
    if device.type == "cpu" or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8)
    try:
        return torch.from_numpy(pinned_array(num_bytes, device.index))
    except CudaOutOfMemory as error:
        raise ConfigError(
            f"{num_bytes / 2**20:,.0f} MiB of host memory for swapping cannot be pinned: {error}; reduce "
            "engine.swap_space_mib or scheduler.num_swap_blocks"
        ) from error
