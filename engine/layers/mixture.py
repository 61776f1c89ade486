"""A mixture of experts: chooses each row's experts, computes one expert after another; knows no checkpoint.

Shape suffixes: T tokens of a step, X experts, G groups of experts, K experts of a token, P pairs of a token and one of
its experts, R those of one expert, E hidden size, I intermediate size of an expert.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from engine.layers.backend import Activations, ExpertRouter, LinearLayer
from engine.mixture_config import LEAST_SUM, Mixture


class Pairs:
    """The inputs and the results of pairs, by torch."""

    def inputs(self, x_TE: torch.Tensor, tokens_P: torch.Tensor) -> torch.Tensor:
        """P x E: each pair's row of `x_TE`."""
        return x_TE[tokens_P]

    def results(self, x_PE: torch.Tensor) -> torch.Tensor:
        """Uninitialized memory of the shape and type of `x_PE`."""
        return torch.empty_like(x_PE)

    def project(self, down: LinearLayer, x_RI: Activations, y_RE: torch.Tensor) -> None:
        """Writes `down(x_RI)` to `y_RE`."""
        y_RE.copy_(down(x_RI))

    def sums(
        self, y_PE: torch.Tensor, tokens_P: torch.Tensor, weights_P: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """T x E: the weighted sum of each token's pairs, added in the order of the pairs in float32."""
        sums_TE = torch.zeros(num_tokens, y_PE.shape[1], dtype=torch.float32, device=y_PE.device)
        return sums_TE.index_add_(0, tokens_P, y_PE * weights_P.unsqueeze(1)).to(y_PE.dtype)


class LoopedMixture:
    """Satisfies `engine.layers.backend.MixtureLayer`, with one product for all rows of an expert.

    Pairs of a token and an expert are in the order of the experts' numbers. So each token's experts are added up in
    this order, whatever experts other tokens use. Experts without pairs are skipped. The host must know how many pairs
    each expert has.
    """

    def __init__(
        self,
        choice: "ExpertChoice",
        experts: Sequence[tuple[LinearLayer, LinearLayer]],
        gated: Callable[[LinearLayer, torch.Tensor], Activations],
        pairs: Pairs,
        here: range | None = None,
    ) -> None:
        """`experts`: for each expert, the projection to gate and up, and the projection back (down).

        `here`: the numbers of these experts; None: these are all experts."""
        self._here = range(choice.num_experts) if here is None else here
        assert len(experts) == len(self._here)
        self._choice = choice
        self._experts = experts
        self._gated = gated
        self._pairs = pairs

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        experts_TK, weights_TK = self._choice(x_TE)
        experts_P, order_P = experts_TK.flatten().sort(stable=True)
        firsts = [0, *accumulate(experts_P.bincount(minlength=self._choice.num_experts).tolist())]
        begin, end = firsts[self._here.start], firsts[self._here.stop]
        if begin == end:
            return torch.zeros_like(x_TE)
        order_P = order_P[begin:end]
        tokens_P, weights_P = order_P // experts_TK.shape[1], weights_TK.flatten()[order_P]
        x_PE = self._pairs.inputs(x_TE, tokens_P)
        y_PE = self._pairs.results(x_PE)
        for number, (gate_up, down) in zip(self._here, self._experts, strict=True):
            own = slice(firsts[number] - begin, firsts[number + 1] - begin)
            if own.start < own.stop:
                self._pairs.project(down, self._gated(gate_up, x_PE[own]), y_PE[own])
        return self._pairs.sums(y_PE, tokens_P, weights_P, len(x_TE))

    def adds(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> bool:
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

    @property
    def num_experts(self) -> int:
        return self.mixture.num_experts

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
