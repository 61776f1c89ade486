"""Converts a GGUF tensor's bytes to floats or to a GroupedWeight, without rounding; knows no file.

A block of bytes contains 32 or 256 values of a row, in one or more groups. Each group has a scale and a
minimum. The layouts are those of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Every value
is scale x number + minimum, rounded to float32 once. ggml's own dequantization gives the same values, since
its other products are exact in float32.

Shape suffixes: N blocks, B bytes of a block, S values of a block, G groups of a block, O rows, I values of a row.
"""

import torch

from engine.layers.grouped_weight import E2M1, GroupedWeight
from engine.loading.gguf import GgufType

FLOATS = {GgufType.F32: torch.float32, GgufType.F16: torch.float16, GgufType.BF16: torch.bfloat16}

_POWERS = [2.0 ** (exponent - 128) for exponent in range(256)]

Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Numbers as uint8 (N x S), and float32 scales and minima (N x G)."""


def matrix_of(kind: GgufType, bytes_OB: torch.Tensor) -> torch.Tensor | GroupedWeight:
    """The matrix in these rows of uint8: floats as they are stored, all other types in groups."""
    if kind in FLOATS:
        return bytes_OB.contiguous().view(FLOATS[kind])
    assert kind.kept_bits is not None
    num_rows = bytes_OB.shape[0]
    values_NS, scales_NG, mins_NG = _GROUPS[kind](bytes_OB.reshape(-1, kind.block_bytes))
    return GroupedWeight(
        values_OI=values_NS.reshape(num_rows, -1),
        bits=kind.kept_bits,
        group_size=kind.group_size,
        scales_OG=scales_NG.reshape(num_rows, -1),
        mins_OG=mins_NG.reshape(num_rows, -1),
        is_e2m1=kind is GgufType.MXFP4,
    )


def _q4_0(b_NB: torch.Tensor) -> Groups:
    """A float16 scale, then 16 bytes: 16 values in low half bytes, 16 more in high ones. 8 means zero."""
    scales_N1 = _halves(b_NB[:, :2])
    return _half_bytes(b_NB[:, 2:]), scales_N1, scales_N1 * -8.0


def _q4_1(b_NB: torch.Tensor) -> Groups:
    """Like Q4_0, with a float16 minimum after the scale."""
    return _half_bytes(b_NB[:, 4:]), _halves(b_NB[:, :2]), _halves(b_NB[:, 2:4])


def _q5_0(b_NB: torch.Tensor) -> Groups:
    """Like Q4_0, with 5 bits per value: 4 bytes before the half bytes have the fifth bits. 16 means zero."""
    scales_N1 = _halves(b_NB[:, :2])
    return _half_bytes(b_NB[:, 6:]) | _fifth_bits(b_NB[:, 2:6]), scales_N1, scales_N1 * -16.0


def _q5_1(b_NB: torch.Tensor) -> Groups:
    """Like Q5_0, with a float16 minimum after the scale."""
    values_NS = _half_bytes(b_NB[:, 8:]) | _fifth_bits(b_NB[:, 4:8])
    return values_NS, _halves(b_NB[:, :2]), _halves(b_NB[:, 2:4])


def _q8_0(b_NB: torch.Tensor) -> Groups:
    """A float16 scale, then 32 signed bytes."""
    scales_N1 = _halves(b_NB[:, :2])
    return b_NB[:, 2:] ^ 0x80, scales_N1, scales_N1 * -128.0  # a signed byte + 128, as an unsigned one


def _q4_k(b_NB: torch.Tensor) -> Groups:
    """8 groups of 32: `_scales_and_mins`, then 4 runs of 32 bytes with two groups each."""
    scales_NG, mins_NG = _scales_and_mins(b_NB)
    return _two_by_two(b_NB[:, 16:], 32).flatten(1), scales_NG, mins_NG


def _q5_k(b_NB: torch.Tensor) -> Groups:
    """Like Q4_K, with 32 more bytes before the runs: bit g of byte i is the fifth bit of value i of group g."""
    scales_NG, mins_NG = _scales_and_mins(b_NB)
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = (b_NB[:, 16:48].unsqueeze(1) >> shifts) & 1
    return (_two_by_two(b_NB[:, 48:], 32) | (fifth << 4)).flatten(1), scales_NG, mins_NG


def _q6_k(b_NB: torch.Tensor) -> Groups:
    """16 groups of 16 values, in which 32 means zero.

    4 low bits are in 2 runs of 64 bytes, 2 high bits in 2 runs of 32 bytes. After them come 16 signed bytes and a
    float16. The scale of a group is the product of its byte and the float16."""
    low = _two_by_two(b_NB[:, :128], 64).reshape(-1, 8, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = ((b_NB[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 8, 32)
    scales_NG = b_NB[:, 192:208].contiguous().view(torch.int8) * _halves(b_NB[:, 208:])
    return (low | (high << 4)).flatten(1), scales_NG, scales_NG * -32.0


def _mxfp4(b_NB: torch.Tensor) -> Groups:
    """A byte with the exponent of the scale, then 16 bytes as in Q4_0: codes of E2M1.

    E2M1 counts in halves, so the scale is 2^(exponent - 128).
    """
    scales_N1 = torch.tensor(_POWERS).index_select(0, b_NB[:, 0].to(torch.int32)).unsqueeze(1)
    return _half_bytes(b_NB[:, 1:]), scales_N1, scales_N1 * -float(E2M1[0])


def _halves(b_NB: torch.Tensor) -> torch.Tensor:
    """Reads every two bytes as a float16, and converts them to float32."""
    return b_NB.contiguous().view(torch.float16).to(torch.float32)


def _half_bytes(b_NB: torch.Tensor) -> torch.Tensor:
    """The low halves of all bytes, then the high halves."""
    num_blocks, size = b_NB.shape
    halves_NS = torch.empty(num_blocks, 2 * size, dtype=torch.uint8)
    torch.bitwise_and(b_NB, 15, out=halves_NS[:, :size])
    torch.bitwise_right_shift(b_NB, 4, out=halves_NS[:, size:])
    return halves_NS


def _two_by_two(b_NB: torch.Tensor, run: int) -> torch.Tensor:
    """For every `run` bytes: first the low half bytes, then the high half bytes."""
    runs = b_NB.reshape(b_NB.shape[0], -1, run)
    return torch.stack((runs & 15, runs >> 4), 2).flatten(1, 2)


def _fifth_bits(b_NB: torch.Tensor) -> torch.Tensor:
    """For value i: bit i of the 4 bytes, times 16."""
    return (((b_NB.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1) << 4).flatten(1)


def _scales_and_mins(b_NB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of Q4_K and Q5_K: two float16 factors, then 8 scales and 8 minima of 6 bits.

    The first 4 scales are in bytes 0 to 3, the first 4 minima in bytes 4 to 7. The other 4 scales and minima have
    their low 4 bits in the last 4 bytes (scales in the low half bytes), and their high 2 bits in the highest bits of
    bytes 0 to 7.
    """
    scale_bytes, min_bytes, low = b_NB[:, 4:8], b_NB[:, 8:12], b_NB[:, 12:16]
    scales = torch.cat((scale_bytes & 63, (low & 15) | ((scale_bytes >> 2) & 48)), 1)
    mins = torch.cat((min_bytes & 63, (low >> 4) | ((min_bytes >> 2) & 48)), 1)
    return _halves(b_NB[:, :2]) * scales, -(_halves(b_NB[:, 2:4]) * mins)


_GROUPS = {
    GgufType.Q4_0: _q4_0,
    GgufType.Q4_1: _q4_1,
    GgufType.Q5_0: _q5_0,
    GgufType.Q5_1: _q5_1,
    GgufType.Q8_0: _q8_0,
    GgufType.Q4_K: _q4_k,
    GgufType.Q5_K: _q5_k,
    GgufType.Q6_K: _q6_k,
    GgufType.MXFP4: _mxfp4,
}
