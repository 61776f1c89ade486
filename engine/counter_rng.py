"""Counter-based random numbers: noise is a pure function of (seed, position, token id), without any state.

Shape suffixes: R rows, V vocabulary.
"""

import numpy as np
import numpy.typing as npt
import torch

_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def row_keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys for one sampled token, from two rounds of SplitMix64 (Steele, Lea, Flood 2014)."""
    key = _splitmix64(_splitmix64(seed) + position)
    return key >> 32, key & 0xFFFFFFFF


def seed_states(seeds: list[int]) -> npt.NDArray[np.uint64]:
    """The state of each row's seed, for `keys_at`. It does not depend on the token's position."""
    return np.array([_splitmix64(seed) for seed in seeds], dtype=np.uint64)


def keys_at(states_R: npt.NDArray[np.uint64], positions_R: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    """R x 2: the results of `row_keys` for all rows at once, as int32 values with the same bits."""
    z_R = states_R + positions_R + np.uint64(_GOLDEN)
    z_R = (z_R ^ (z_R >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_R = (z_R ^ (z_R >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z_R ^= z_R >> np.uint64(31)
    keys_R2 = np.empty((len(z_R), 2), dtype=np.uint32)
    keys_R2[:, 0] = z_R >> np.uint64(32)
    keys_R2[:, 1] = z_R & np.uint64(0xFFFFFFFF)
    return keys_R2.view(np.int32)


def gumbel_noise(keys: list[tuple[int, int]], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise R x V (float32, finite); row r depends only on keys[r].

    The arg max over `log p + noise` is a draw from p (Gumbel-max). So the same noise gives the same token,
    whatever else is in the batch. Each element is a 32-bit hash with two multiplications (constants of
    Wellons' lowbias32, 2018). The first key is applied before the first multiplication, the second key
    between the two multiplications. The hash gives u = (23 bits + 1/2) / 2^23, which float32 represents
    exactly, and which is never 0 or 1.
    """
    first_R1, second_R1 = (
        torch.tensor([_signed(key[i]) for key in keys], dtype=torch.int32, device=device).unsqueeze(1)
        for i in (0, 1)
    )
    x_RV = torch.arange(vocab_size, dtype=torch.int32, device=device) ^ first_R1
    x_RV ^= _shifted(x_RV, 16)
    x_RV *= 0x7FEB352D
    x_RV += second_R1
    x_RV ^= _shifted(x_RV, 15)
    x_RV *= _signed(0x846CA68B)
    x_RV ^= _shifted(x_RV, 16)
    u_RV = _shifted(x_RV, 9).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return u_RV.log_().neg_().log_().neg_()


def _splitmix64(state: int) -> int:
    z = (state + _GOLDEN) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    """The int32 with the same bits. torch has no unsigned arithmetic, but signed products have the same bits."""
    return value - 2**32 if value >= 2**31 else value


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts right, and fills with zeros (logical shift). torch's `>>` is an arithmetic shift."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
