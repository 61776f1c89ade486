"""How attention is launched: tile sizes, warps and stages from shapes alone; knows no tensor.

One kernel has two tunings. Decoding is bound by memory: few rows, many keys in flight, several programs on a
multiprocessor. Prefill is bound by the matrix units: tiles with as many rows as the registers allow.
"""

from dataclasses import dataclass

from engine.kernels.attention_plan import TileGrid

RESERVED_BYTES = 3 * 1024
"""Shared memory of a multiprocessor that launches take for themselves."""
SHARED_BYTES = 227 * 1024 - RESERVED_BYTES
"""Shared memory that programs on an H100's or H200's multiprocessor can have together."""
MIN_BLOCK_N = 16


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The same for every launch of one rank of a model."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens of a KV block."""
    dtype_bytes: int
    """Bytes of an element of queries and output."""
    kv_dtype_bytes: int
    has_copy_engine: bool = True
    """Whether the GPU copies tensors in bulk: compute capability 9.0 and later."""
    shared_bytes: int = SHARED_BYTES
    """Shared memory that all programs on a multiprocessor can have together."""

    def __post_init__(self) -> None:
        assert self.num_query_heads % self.num_kv_heads == 0, "query heads come in equal groups"
        assert self.head_dim in range(16, 257, 8), f"heads of {self.head_dim}"

    @property
    def group_size(self) -> int:
        """Query heads per kv head; they share a tile."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def padded_head_dim(self) -> int:
        return _power_of_two(self.head_dim)

    @property
    def uses_tma(self) -> bool:
        """Whether the bulk copy engine fetches keys and values.

        It needs blocks of a power of two of tokens, and rows of whole 16-byte units. It copies one span of a block at a
        time; with fewer than 32 tokens that is too little for a tile.
        """
        if not self.has_copy_engine or self.head_dim * self.kv_dtype_bytes % 16 != 0:
            return False
        return self.block_size >= 32 and self.block_size & (self.block_size - 1) == 0


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    """Parameters of a launch."""

    block_m: int
    """Rows of a tile: queries x query heads of one kv head."""
    block_n: int
    """Keys processed at a time."""
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    max_registers: int | None = None
    """Registers of a thread; None: the assembler decides."""

    def grid(self, shape: AttentionShape, num_multiprocessors: int) -> TileGrid:
        return TileGrid(
            queries=self.block_m // shape.group_size,
            keys=self.block_n,
            num_programs=num_multiprocessors * self.programs_per_multiprocessor,
            num_kv_heads=shape.num_kv_heads,
        )


def decode_tuning(shape: AttentionShape, num_queries: int = 1) -> AttentionTuning:
    """For requests of a few queries, `num_queries` each."""
    block_m = max(16, _power_of_two(num_queries * shape.group_size))
    preferred = _block_n(shape, 64 if shape.padded_head_dim <= 128 else 32)
    # Two programs a multiprocessor: while one begins or ends an item, the other keeps memory busy. Operands of such
    # small products are read into registers first, so shared memory holds one stage less than there are.
    tile_bytes = block_m * (shape.padded_head_dim + preferred) * shape.dtype_bytes
    shared_bytes = shape.shared_bytes // 2 - tile_bytes
    block_n = _fitting(shape, preferred, shared_bytes)
    num_buffers = _num_buffers(shape, block_n, shared_bytes, 4)
    # The limit gives two programs all registers, so that the assembler does not spill to make room for a third.
    return AttentionTuning(block_m, block_n, 4, num_buffers + 1, 2, max_registers=248)


def prefill_tuning(shape: AttentionShape) -> AttentionTuning:
    """For chunks of many queries; also computes decodes among them."""
    is_float32 = shape.dtype_bytes > 2
    block_m = max(64 if is_float32 else 128, _power_of_two(shape.group_size))
    preferred = _block_n(shape, _prefill_keys(shape))
    shared_bytes = shape.shared_bytes - block_m * shape.padded_head_dim * shape.dtype_bytes
    block_n = _fitting(shape, preferred, shared_bytes)
    return AttentionTuning(block_m, block_n, 8, _num_buffers(shape, block_n, shared_bytes, 3), 1)


def _prefill_keys(shape: AttentionShape) -> int:
    """The most keys that fit into registers. 128 keys use all registers; pointer gathers or wider heads would spill."""
    if shape.dtype_bytes > 2:
        return 32 if shape.padded_head_dim <= 64 else 16
    if shape.padded_head_dim > 128:
        return 32
    return 128 if shape.uses_tma and shape.kv_dtype_bytes == 2 else 64


def _block_n(shape: AttentionShape, preferred: int) -> int:
    """`preferred`, or a block's tokens if fewer: the copy engine's loads stay within a block."""
    return min(preferred, shape.block_size) if shape.uses_tma else preferred


def _fitting(shape: AttentionShape, block_n: int, shared_bytes: int) -> int:
    """`block_n` keys, or fewer if two buffers of that size do not fit."""
    while block_n > MIN_BLOCK_N and 2 * _buffer_bytes(shape, block_n) > shared_bytes:
        block_n //= 2
    return block_n


def _buffer_bytes(shape: AttentionShape, block_n: int) -> int:
    """Bytes of a buffer of keys and values."""
    return 2 * block_n * shape.padded_head_dim * shape.kv_dtype_bytes


def _num_buffers(shape: AttentionShape, block_n: int, shared_bytes: int, most: int) -> int:
    """As many buffers as fit, at least two."""
    return max(2, min(most, shared_bytes // _buffer_bytes(shape, block_n)))


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
