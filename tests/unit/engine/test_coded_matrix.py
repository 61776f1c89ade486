"""Packed integers and their zero points, by tensors that are computed by hand."""

import torch

from engine.loading.coded_matrix import CodedMatrix, gptq_zeros, unpacked, unpacked_awq


def int32(*values: int) -> torch.Tensor:
    return torch.tensor([[value - 2**32 if value >= 2**31 else value for value in values]], dtype=torch.int32)


def test_the_lowest_bits_are_first() -> None:
    assert unpacked(int32(0x76543210, 0xFEDCBA98), 4).tolist() == [list(range(16))]
    assert unpacked(int32(0x03020100, 0xFFFEFDFC), 8).tolist() == [[0, 1, 2, 3, 252, 253, 254, 255]]


def test_awq_has_even_outputs_in_the_lower_half() -> None:
    assert unpacked_awq(int32(0x75316420, 0xFDB9ECA8)).tolist() == [[value] for value in range(16)]


def test_one_is_added_to_packed_zero_points_with_carries() -> None:
    assert unpacked(gptq_zeros(int32(0x77777777), 4), 4).tolist() == [[8] * 8]
    assert unpacked(gptq_zeros(int32(0x7F7F7F7F), 8), 8).tolist() == [[128] * 4]
    # Zero points 0, 8, 0, 5, 0, 0, 0, 0, each less 1; a zero point of 0 borrows from the next one.
    assert unpacked(gptq_zeros(int32(0x5080 - 0x11111111 + 2**32), 4), 4).tolist() == [
        [0, 8, 0, 5, 0, 0, 0, 0]
    ]


def test_a_weight_is_the_value_less_zero_times_the_scale_of_its_group() -> None:
    matrix = CodedMatrix(
        torch.tensor([[0, 15, 3, 8], [7, 8, 9, 1]], dtype=torch.uint8),
        4,
        torch.tensor([[0.5, 2.0], [1.0, -1.0]]),
        torch.tensor([[8.0, 3.0], [7.0, 0.0]]),
        torch.tensor([0, 0, 1, 0]),
    )
    assert matrix.numbers(torch.float32).tolist() == [[-4.0, 3.5, 0.0, 0.0], [0.0, 1.0, -9.0, -6.0]]
    assert matrix.grouped() is None


def test_floats_of_4_bits_are_kept_if_the_kernels_represent_their_powers_of_two() -> None:
    """A group of zeros, of either sign, may have any scale."""

    def is_kept(exponent: int, code: int = 5) -> bool:
        values_OI = torch.full((2, 64), 3, dtype=torch.uint8)
        values_OI[1, 32:] = code
        scales_OG = torch.ones(2, 2)
        scales_OG[1, 1] = 2.0**exponent
        zeros_OG = torch.full((2, 2), 12.0)
        matrix = CodedMatrix(values_OI, 4, scales_OG, zeros_OG, torch.arange(64) // 32, is_e2m1=True)
        return matrix.grouped() is not None

    assert is_kept(-38)
    assert is_kept(38)
    assert not is_kept(-39)
    assert not is_kept(39)
    assert is_kept(-100, code=0)
    assert is_kept(-100, code=8)
