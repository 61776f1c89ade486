"""A mixture of experts: chooses each row's experts, computes one expert after another; knows no checkpoint.

Shape suffixes: T tokens of a step, X experts, G groups of experts, K experts of a token, P pairs of a token and one of
its experts, R those of one expert, E hidden size, I intermediate size of an expert.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from engine.layers.backend import Activations, ExpertRouter, LinearLayer
from engine.mixture_config import LEAST_SUM, Mixture


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs of a token and an expert, sorted by the expert's number, then by token."""

    firsts_X: torch.Tensor
    """int64, X + 1 numbers: each expert's first pair, then the number of all pairs."""
    tokens_P: torch.Tensor
    """int64."""
    weights_P: torch.Tensor


def sorted_pairs(experts_TK: torch.Tensor, weights_TK: torch.Tensor, own_experts: range) -> SortedPairs:
    """The pairs of this rank's experts, whose numbers are `own_experts`."""
    experts_P, order_P = experts_TK.flatten().sort(stable=True)
    numbers_X = torch.arange(own_experts.start, own_experts.stop + 1, device=experts_P.device)
    firsts_X = torch.searchsorted(experts_P, numbers_X)
    order_P = order_P[firsts_X[0] : firsts_X[-1]]
    return SortedPairs(firsts_X - firsts_X[0], order_P // experts_TK.shape[1], weights_TK.flatten()[order_P])


class LoopedMixture:
    """A `MixtureLayer` of engine/layers/backend.py, with one product for all rows of an expert.

    Pairs of a token and an expert are in the order of the experts' numbers. So each token's experts are added up in
    this order, whatever experts other tokens use. Experts without pairs are skipped. The host must know how many pairs
    each expert has.
    """

    def __init__(
        self,
        choice: "ExpertChoice",
        experts: Sequence[tuple[LinearLayer, LinearLayer]],
        gated: Callable[[LinearLayer, torch.Tensor], Activations],
        own_experts: range,
    ) -> None:
        """`experts`: for each expert, the projection to gate and up, and the projection back (down).

        `own_experts`: the numbers of these experts."""
        assert len(experts) == len(own_experts)
        self._own_experts = own_experts
        self._choice = choice
        self._experts = experts
        self._gated = gated

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        pairs = sorted_pairs(*self._choice(x_TE), self._own_experts)
        x_PE = x_TE[pairs.tokens_P]
        y_PE = torch.empty_like(x_PE)
        for (gate_up, down), (first, end) in zip(
            self._experts, pairwise(pairs.firsts_X.tolist()), strict=True
        ):
            if first < end:
                y_PE[first:end] = down(self._gated(gate_up, x_PE[first:end]))
        sums_TE = torch.zeros(x_TE.shape, dtype=torch.float32, device=x_TE.device)
        return sums_TE.index_add_(0, pairs.tokens_P, y_PE * pairs.weights_P.unsqueeze(1)).to(x_TE.dtype)

    def try_add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> bool:
        del x_TE, residual_TE
        return False


class ExpertChoice:
    """Chooses the experts of rows."""

    def __init__(self, mixture: Mixture, router: ExpertRouter, scores: LinearLayer) -> None:
        """`scores`: computes the product with the router's matrix."""
        assert (router.choice_bias_X is not None) == mixture.has_choice_bias
        self.mixture = mixture
        self._scores = scores
        self._dtype = router.weight_XE.dtype
        self.bias_X = router.choice_bias_X

    def __call__(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each row, best first, and their weights in float32: two tensors of T x K."""
        return route(self.logits(x_TE), self.mixture, self.bias_X)

    def logits(self, x_TE: torch.Tensor) -> torch.Tensor:
        """T x X: the router's product, in the router's dtype."""
        return self._scores(x_TE.to(self._dtype))


def route(
    logits_TX: torch.Tensor, mixture: Mixture, bias_X: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, best first, and their weights in float32: two tensors of T x K."""
    if mixture.is_sigmoid:
        scores_TX = logits_TX.to(torch.float32).sigmoid()
    else:
        scores_TX = logits_TX.softmax(-1, dtype=torch.float32)
    ranked_TX = scores_TX if bias_X is None else scores_TX + bias_X
    if mixture.num_chosen_groups < mixture.num_groups:
        ranked_TX = _within_best_groups(ranked_TX, mixture)
    weights_TK, experts_TK = ranked_TX.topk(mixture.num_chosen, -1)
    if bias_X is not None:
        weights_TK = scores_TX.gather(-1, experts_TK)
    if mixture.is_normalized:
        total_T1 = weights_TK.sum(-1, keepdim=True)
        weights_TK = weights_TK / (total_T1 + LEAST_SUM if mixture.is_sigmoid else total_T1)
    return experts_TK, weights_TK if mixture.scale == 1.0 else weights_TK * mixture.scale


def _within_best_groups(ranked_TX: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """For each row, sets the scores of all experts outside of the best groups to -inf."""
    ranked_TGX = ranked_TX.unflatten(-1, (mixture.num_groups, -1))
    groups_TG = ranked_TGX.topk(mixture.num_compared, -1).values.sum(-1)
    best_TG = groups_TG.topk(mixture.num_chosen_groups, -1).indices
    is_hidden_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(-1, best_TG, value=False)
    visible_TGX: torch.Tensor = ranked_TGX.masked_fill(is_hidden_TG.unsqueeze(-1), -math.inf)
    return visible_TGX.flatten(-2)
