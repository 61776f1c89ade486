"""vocabulary: a worker's bytes for the embeddings and for the projection to logits; imports no torch.

The embeddings are looked up, and the projection is multiplied. Kernels of a CPU multiply a matrix in a layout of their
own, so a CPU holds a matrix twice if it is both looked up and multiplied.
"""

from dataclasses import dataclass

ROUNDED_BITS = 9.0
"""With `model.quantization` int8 or int4, each value of the projection's matrix takes at most this many bits in the
kernels' layout, with its share of the scale. Embeddings and projection are never rounded to fewer than 8 bits."""
ROUNDED_GROUP_SIZE = 32
"""How many inputs form a group in a matrix that is rounded to int8 or int4."""


@dataclass(frozen=True, slots=True)
class StoredTable:
    """The embeddings, or the projection to logits, in a folder's files."""

    num_parameters: int = 0
    num_bytes: int = 0
    """The bytes, counted as in StoredWeights."""
    packed_bytes: int = 0
    """Bytes in the layout of Baton's CPU kernels, if the numbers stay in the format of the file."""
    group_size: int | None = None
    """How many numbers share a scale, if a CPU can keep them in groups; None: they become plain numbers."""


def vocabulary_bytes(
    embeddings: StoredTable,
    lm_head: StoredTable,
    quantization: str,
    number_bytes: int,
    *,
    is_tied: bool,
    is_cpu: bool,
    has_kernels: bool,
) -> int:
    """The bytes of embeddings and projection together. `number_bytes`: the bytes of a number of `model.dtype`.
    `is_tied`: the embeddings are also the projection.

    `has_kernels`: whether workers have Baton's CPU kernels.
    """
    if not is_cpu:
        return number_bytes * (embeddings.num_parameters + (0 if is_tied else lm_head.num_parameters))
    keeps_groups = quantization == "auto" and has_kernels
    rounds = quantization in ("int8", "int4")
    projection = embeddings if is_tied else lm_head
    looked_up = number_bytes * embeddings.num_parameters
    if rounds or (keeps_groups and embeddings.group_size is not None):
        looked_up = _bytes_in_groups(embeddings)
    numbers = number_bytes * projection.num_parameters
    if rounds and not has_kernels:  # without Baton's kernels, torch multiplies groups that are not packed
        return looked_up + (0 if is_tied else _bytes_in_groups(lm_head))
    if rounds:
        rounded = int(projection.num_parameters * ROUNDED_BITS / 8)
        return looked_up + min(rounded, projection.packed_bytes)
    if has_kernels and (keeps_groups or projection.group_size is None):
        return looked_up + min(projection.packed_bytes, numbers)
    return looked_up + numbers


def _bytes_in_groups(table: StoredTable) -> int:
    return int(table.num_parameters * bits_in_groups(table.group_size or ROUNDED_GROUP_SIZE) / 8)


def bits_in_groups(group_size: int) -> float:
    """Bits of a number of a GroupedWeight: a byte, and a scale and a minimum of 32 bits for each group."""
    return 8 + 64 / group_size
