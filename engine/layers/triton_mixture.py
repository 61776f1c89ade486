"""TritonMixture: a mixture of experts on a GPU; the host does not wait for the GPU; knows no checkpoint.

Shape suffixes: T tokens of a step, K experts of a token, N pairs of token and expert, X experts, O outputs, E
hidden size, I intermediate size.
"""

from collections.abc import Iterable, Sequence

import torch

from engine.kernels.expert_linear import ExpertMatrices, expert_linear
from engine.kernels.routing import route_rows
from engine.kernels.sort_pairs import ExpertPairs
from engine.kernels.sum_pairs import sum_pairs
from engine.kernels.switches import kernel_switches
from engine.layers.backend import Expert, Matrix
from engine.layers.fp8 import FP8, Fp8Weight
from engine.layers.grouped_weight import GroupedWeight
from engine.layers.mixture import ExpertChoice


class TritonMixture:
    """A `MixtureLayer` of engine/layers/backend.py, with one launch for the products of all experts.

    `is_fp8`: converts the experts' matrices to 8-bit floats; activations keep their dtype.
    """

    def __init__(
        self, choice: ExpertChoice, experts: Iterable[Expert], own_experts: range, *, is_fp8: bool
    ) -> None:
        """`own_experts`: the indices of `experts` among all experts of the layer."""
        self._choice = choice
        gate_up = _Stack(len(own_experts), is_fp8=is_fp8)
        down = _Stack(len(own_experts), is_fp8=is_fp8)
        for place, expert in enumerate(experts):
            gate_up.put(place, (expert.gate_IE, expert.up_IE), expert.biases_I)
            down.put(place, (expert.down_EI,), None if expert.down_bias_E is None else (expert.down_bias_E,))
        self._gate_up, self._down = gate_up.matrices(), down.matrices()
        self._places_X = None
        num_experts = choice.mixture.num_experts
        if len(own_experts) < num_experts:
            self._places_X = _places(own_experts, num_experts, self._down.weight_XOI.device)

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self._sum(x_TE)

    def try_add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> bool:
        if not kernel_switches().fused_residual:
            return False
        self._sum(x_TE, residual_TE)
        return True

    def _sum(self, x_TE: torch.Tensor, residual_TE: torch.Tensor | None = None) -> torch.Tensor:
        mixture = self._choice.mixture
        experts_TK, weights_TK = route_rows(
            self._choice.logits(x_TE), mixture, self._choice.bias_X, self._places_X
        )
        pairs = ExpertPairs.of(experts_TK, len(self._down.weight_XOI), mixture.num_experts)
        x_NI = expert_linear(x_TE, self._gate_up, pairs, activation=mixture.activation)
        y_NE = expert_linear(x_NI, self._down, pairs, factors_N=weights_TK.flatten())
        return sum_pairs(y_NE, pairs, residual_TE)


def _places(own_experts: range, num_experts: int, device: torch.device) -> torch.Tensor:
    """Each expert's index among this rank's experts; other ranks' experts get the next index after them."""
    places_X = torch.full((num_experts,), len(own_experts), dtype=torch.int32, device=device)
    places_X[own_experts.start : own_experts.stop] = torch.arange(
        len(own_experts), dtype=torch.int32, device=device
    )
    return places_X


class _Stack:
    """One matrix of each expert, in one tensor that is filled as the experts arrive.

    So only one expert's matrix is in memory twice at a time.
    """

    def __init__(self, num_experts: int, *, is_fp8: bool) -> None:
        self._num_experts = num_experts
        self._is_fp8 = is_fp8
        self._weight_XOI: torch.Tensor | None = None
        self._scales_XO: torch.Tensor | None = None
        self._bias_XO: torch.Tensor | None = None

    def put(self, number: int, parts: Sequence[Matrix], biases: Sequence[torch.Tensor] | None) -> None:
        """Stores the outputs of all parts, in order, for one expert.

        Either all experts have `biases`, or none.
        """
        if self._weight_XOI is None:
            self._allocate(parts, has_bias=biases is not None)
            assert self._weight_XOI is not None
        first = 0
        for index, part in enumerate(parts):
            outputs = slice(first, first := first + part.shape[0])
            if biases is not None and self._bias_XO is not None:
                self._bias_XO[number, outputs] = biases[index]
            if self._scales_XO is None:
                self._weight_XOI[number, outputs] = _numbers(part)
                continue
            weight = part if isinstance(part, Fp8Weight) else Fp8Weight.quantize(_numbers(part))
            self._weight_XOI[number, outputs] = weight.values_OI
            self._scales_XO[number, outputs] = weight.scales_O1.squeeze(1)

    def _allocate(self, parts: Sequence[Matrix], *, has_bias: bool) -> None:
        """Allocates tensors for all experts by the first expert's parts; 8-bit floats stay 8-bit floats."""
        first = parts[0]
        is_fp8 = self._is_fp8 or isinstance(first, Fp8Weight)
        shape = (self._num_experts, sum(part.shape[0] for part in parts))
        dtype, device = FP8 if is_fp8 else _numbers(first).dtype, _device(first)
        self._weight_XOI = torch.empty(*shape, first.shape[1], dtype=dtype, device=device)
        self._scales_XO = torch.empty(shape, dtype=torch.float32, device=device) if is_fp8 else None
        self._bias_XO = torch.empty(shape, dtype=torch.float32, device=device) if has_bias else None

    def matrices(self) -> ExpertMatrices:
        assert self._weight_XOI is not None
        return ExpertMatrices(self._weight_XOI, self._scales_XO, self._bias_XO)


def _device(part: Matrix) -> torch.device:
    assert not isinstance(part, GroupedWeight), "4 and 8 bits in groups are for CPUs"
    return part.device


def _numbers(part: Matrix) -> torch.Tensor:
    assert not isinstance(part, GroupedWeight), "4 and 8 bits in groups are for CPUs"
    return part.dequantized() if isinstance(part, Fp8Weight) else part
