"""Chooses tile sizes, warps and stages of attention's launches, by shapes alone; knows no tensor.

Each kernel has two tunings. Memory limits the speed of decoding, so its tuning has few rows, many keys in
flight, and several programs on a multiprocessor. The matrix units limit the speed of prefill, so its tuning
has tiles with as many rows as the registers allow.
"""

from dataclasses import dataclass

from engine.kernels.attention_plan import TileGrid
from engine.latent_config import MAX_GPU_RANK, MAX_GPU_ROTARY_DIM

RESERVED_BYTES = 3 * 1024
"""Shared memory of a multiprocessor that launches need for themselves."""
SHARED_BYTES = 227 * 1024 - RESERVED_BYTES
"""Shared memory that all programs on a multiprocessor of an H100 or H200 can use together."""
DECODE_BYTES = 64 * 1024
"""Bytes of keys and values that a program of decodes loads ahead. More bytes are no faster, and leave less L1
cache."""
MIN_BLOCK_N = 16
MIN_PRODUCT = 16
"""The least number of a row's elements that the matrix units multiply."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shapes that are the same in every launch of one rank of a model."""

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
    """Shared memory that all programs on a multiprocessor can use together."""
    latent_rank: int | None = None
    """Length of a token's latent, if the cache stores latents instead of keys and values. The latent is the
    value of all query heads. The key is the latent followed by a rotated part, together `head_dim`
    numbers."""

    def __post_init__(self) -> None:
        assert self.num_query_heads % self.num_kv_heads == 0, "query heads come in equal groups"
        if self.latent_rank is None:
            assert self.head_dim in range(16, 257, 8), f"heads of {self.head_dim}"
        else:
            assert self.num_kv_heads == 1, f"{self.num_kv_heads} heads of a latent"
            assert self.latent_rank <= MAX_GPU_RANK, f"latents of {self.latent_rank}"
            assert 0 < self.rotary_dim <= MAX_GPU_ROTARY_DIM, f"a rotated part of {self.rotary_dim}"

    @property
    def group_size(self) -> int:
        """How many query heads share a tile: those of a kv head, or as many as fit into a tile of latents."""
        if self.latent_rank is None:
            return self.num_query_heads // self.num_kv_heads
        return max(n for n in range(1, self._most_rows + 1) if self.num_query_heads % n == 0)

    @property
    def num_groups(self) -> int:
        """Number of groups of query heads; programs compute each item once for each group."""
        return self.num_query_heads // self.group_size

    @property
    def value_dim(self) -> int:
        """Length of a value, and of a head's result."""
        return self.head_dim if self.latent_rank is None else self.latent_rank

    @property
    def rotary_dim(self) -> int:
        """How many numbers of a key are not part of the value."""
        return self.head_dim - self.value_dim

    @property
    def padded_head_dim(self) -> int:
        return _power_of_two(self.head_dim)

    @property
    def padded_rank(self) -> int:
        return max(MIN_PRODUCT, _power_of_two(self.value_dim))

    @property
    def padded_rotary_dim(self) -> int:
        return max(MIN_PRODUCT, _power_of_two(self.rotary_dim))

    @property
    def uses_tma(self) -> bool:
        """Whether the bulk copy engine fetches keys and values.

        The copy engine needs blocks whose number of tokens is a power of two, and rows of a multiple of 16 bytes.
        It copies one span of a block at a time. In blocks of fewer than 32 tokens, a span is too small for a
        tile.
        """
        row_bytes = (self.head_dim * self.kv_dtype_bytes, self.value_dim * self.kv_dtype_bytes)
        if not self.has_copy_engine or any(size % 16 != 0 for size in row_bytes):
            return False
        return self.block_size >= 32 and self.block_size & (self.block_size - 1) == 0

    @property
    def _most_rows(self) -> int:
        """How many rows a tile may have so that its sums over latents fit into registers.

        Before Hopper, and with float32, the operands of products need registers, too."""
        if self.dtype_bytes > 2:
            return 16
        return 64 if self.has_copy_engine else 32


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    """Parameters of a launch."""

    block_m: int
    """Rows of a tile: queries x query heads that share it."""
    block_n: int
    """Keys processed at a time."""
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    max_registers: int | None = None
    """The most registers of a thread; None: the assembler decides."""

    def grid(self, shape: AttentionShape, num_multiprocessors: int) -> TileGrid:
        return TileGrid(
            queries=self.block_m // shape.group_size,
            keys=self.block_n,
            num_programs=num_multiprocessors * self.programs_per_multiprocessor,
            num_kv_heads=shape.num_groups,
        )


def decode_tuning(shape: AttentionShape) -> AttentionTuning:
    """The tuning for requests with one query each."""
    block_m = max(16, _power_of_two(shape.group_size))
    preferred = _block_n(shape, 64 if shape.padded_head_dim <= 128 else 32)
    # Two programs run on a multiprocessor: while one begins or ends an item, the other keeps memory busy.
    # Operands of such small products are first read into registers, so shared memory needs one stage less
    # than `num_stages`.
    tile_bytes = block_m * (shape.padded_head_dim + preferred) * shape.dtype_bytes
    shared_bytes = shape.shared_bytes // 2 - tile_bytes
    block_n = _fitting(shape, preferred, shared_bytes)
    num_buffers = _num_buffers(
        shape, block_n, shared_bytes, max(2, DECODE_BYTES // _buffer_bytes(shape, block_n))
    )
    # The limit gives all registers to two programs, so that the assembler does not spill to make room for a
    # third program.
    return AttentionTuning(block_m, block_n, 4, num_buffers + 1, 2, max_registers=248)


def prefill_tuning(shape: AttentionShape) -> AttentionTuning:
    """The tuning for chunks of many queries, and for decodes in the same step."""
    is_float32 = shape.dtype_bytes > 2
    block_m = max(64 if is_float32 else 128, _power_of_two(shape.group_size))
    preferred = _block_n(shape, _prefill_keys(shape))
    shared_bytes = shape.shared_bytes - block_m * shape.padded_head_dim * shape.dtype_bytes
    block_n = _fitting(shape, preferred, shared_bytes)
    return AttentionTuning(block_m, block_n, 8, _num_buffers(shape, block_n, shared_bytes, 3), 1)


def latent_tuning(shape: AttentionShape, *, has_chunks: bool) -> AttentionTuning:
    """The tuning for latents: for steps with only decodes, or for steps with chunks, perhaps with decodes."""
    rows = shape._most_rows if has_chunks else max(16, _power_of_two(shape.group_size))
    is_small = rows == 16 and shape.kv_dtype_bytes == 2
    num_programs = 2 if is_small else 1
    num_warps = 4 if is_small else 8
    # A converted 8-bit tile needs more registers per key. For the matrix units of Hopper it also needs shared
    # memory.
    is_wide = rows == 32 or (rows == 64 and shape.kv_dtype_bytes == 2)
    block_n = _block_n(shape, 64 if is_wide else 32)
    size = shape.padded_rank + shape.padded_rotary_dim

    def needed_bytes(block_n: int, num_buffers: int) -> int:
        """Bytes of queries, weights and tiles, including converted tiles for the matrix units of Hopper."""
        converted = block_n * size * shape.dtype_bytes if rows == 64 and shape.kv_dtype_bytes == 1 else 0
        tiles = num_buffers * block_n * size * shape.kv_dtype_bytes + converted
        return rows * (size + block_n) * shape.dtype_bytes + tiles

    room = shape.shared_bytes // num_programs
    while block_n > MIN_BLOCK_N and needed_bytes(block_n, 2) > room:
        block_n //= 2
    num_buffers = max(n for n in (1, 2, 3) if n == 1 or needed_bytes(block_n, n) <= room)
    # Except on Hopper, operands of the matrix units are first read into registers, which frees a stage.
    num_stages = num_buffers if rows == 64 or shape.dtype_bytes > 2 else num_buffers + 1
    return AttentionTuning(rows, block_n, num_warps, num_stages, num_programs)


def _prefill_keys(shape: AttentionShape) -> int:
    """The most keys that fit into registers. 128 keys use all registers. With pointer gathers or wider heads,
    128 keys would spill."""
    if shape.dtype_bytes > 2:
        return 32 if shape.padded_head_dim <= 64 else 16
    if shape.padded_head_dim > 128:
        return 32
    return 128 if shape.uses_tma and shape.kv_dtype_bytes == 2 else 64


def _block_n(shape: AttentionShape, preferred: int) -> int:
    """`preferred` keys; at most a block's keys if the copy engine loads them, since its loads stay within a block."""
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
    """As many buffers as fit: at least two, and at most `most`."""
    return max(2, min(most, shared_bytes // _buffer_bytes(shape, block_n)))


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
