"""A mixture of experts: chooses each row's experts, computes one expert after another; knows no checkpoint.

Shape suffixes: T tokens of a step, X experts, G groups of experts, K experts of a token, R rows of one
expert, E hidden size.
"""

import math
from collections.abc import Callable, Sequence

import torch

from engine.layers.backend import Activations, ExpertRouter, LinearLayer
from engine.mixture_config import LEAST_SUM, Mixture


class LoopedMixture:
    """Satisfies `engine.layers.backend.MixtureLayer`, with one product for all rows of an expert.

    Experts without rows are skipped. The host must know how many rows each expert has.
    """

    def __init__(
        self,
        choice: "ExpertChoice",
        experts: Sequence[tuple[LinearLayer, LinearLayer]],
        gated: Callable[[LinearLayer, torch.Tensor], Activations],
        here: range | None = None,
    ) -> None:
        """`experts`: for each expert, the projection to gate and up, and the projection back (down).

        `here`: the numbers of these experts; None: these are all experts."""
        self._here = range(choice.num_experts) if here is None else here
        assert len(experts) == len(self._here)
        self._choice = choice
        self._experts = experts
        self._gated = gated

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        experts_TK, weights_TK = self._choice(x_TE)
        # A row's experts are added in the order of their numbers, whatever experts the other rows use.
        sums_TE = torch.zeros(x_TE.shape, dtype=torch.float32, device=x_TE.device)
        rows_by_expert = _rows_by_expert(experts_TK, weights_TK, self._choice.num_experts)
        for expert, (gate_up, down) in zip(self._here, self._experts, strict=True):
            rows_R, weights_R = rows_by_expert[expert]
            if len(rows_R):
                y_RE = down(self._gated(gate_up, x_TE[rows_R]))
                sums_TE.index_add_(0, rows_R, y_RE * weights_R.unsqueeze(1))
        return sums_TE.to(x_TE.dtype)

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


def _rows_by_expert(
    experts_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each expert, the rows that use it, and its weight in each of these rows."""
    order = experts_TK.flatten().argsort(stable=True)
    counts = torch.bincount(experts_TK.flatten(), minlength=num_experts).tolist()
    rows, weights = order // experts_TK.shape[1], weights_TK.flatten()[order]
    return list(zip(rows.split(counts), weights.split(counts), strict=True))
