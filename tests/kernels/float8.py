"""Compares float8_e4m3fn tensors, around what Triton's interpreter gets wrong."""

import torch


def assert_same_float8(actual: torch.Tensor, expected: torch.Tensor, max_share: float = 0.0) -> None:
    """Checks that the tensors are equal. At most `max_share` of the elements may be neighbouring floats, for inputs
    that differ by a rounding.

    Triton's interpreter (seen in 3.6.0 and 3.9.0) forgets to carry where rounding ends at a power of two: 126 becomes
    64, not 128; and it rounds ties away from zero, where hardware and torch round them to even. So on CPU half of an
    expected power of two passes too, and so do neighbours, if they are no more than a twentieth of all.
    """
    assert actual.dtype is expected.dtype is torch.float8_e4m3fn
    actual, expected = actual.to(torch.float32), expected.to(torch.float32)
    is_right = actual == expected
    if actual.device.type == "cpu":
        is_power_of_two = expected.abs().frexp().mantissa == 0.5
        is_right |= is_power_of_two & (actual * 2 == expected)
        max_share = max(max_share, 0.05)
    wrong, right = actual[~is_right], expected[~is_right]
    assert len(wrong) <= max_share * expected.numel(), f"{len(wrong)} differ: {wrong[:8]}, not {right[:8]}"
    torch.testing.assert_close(wrong, right, rtol=0.126, atol=2.0**-9)  # a step of e4m3
