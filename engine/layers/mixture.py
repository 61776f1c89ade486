"""A mixture of experts: which experts a row takes, and their products, one expert after another; knows no checkpoint.

Shape suffixes: T tokens of a step, X experts, K experts of a token, R rows of one expert, E hidden size.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from engine.layers.backend import Activations, LinearLayer
from engine.model_config import Mixture


class LoopedMixture:
    """Satisfies `engine.layers.backend.MixtureLayer`: one product for all rows of an expert; none for one without rows.

    The host must know how many rows each expert has.
    """

    def __init__(
        self,
        mixture: Mixture,
        router: LinearLayer,
        experts: Sequence[tuple[LinearLayer, LinearLayer]],
        gated: Callable[[LinearLayer, torch.Tensor], Activations],
    ) -> None:
        """`experts`: for each expert, the projection to gate and up, and the projection back (down)."""
        assert len(experts) == mixture.num_experts
        self._mixture = mixture
        self._router = router
        self._experts = experts
        self._gated = gated

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        experts_TK, weights_TK = route(self._router(x_TE), self._mixture)
        # A row's experts are added in the order of their numbers, whatever the other rows take.
        sums_TE = torch.zeros(x_TE.shape, dtype=torch.float32, device=x_TE.device)
        for expert, rows_R, weights_R in _rows_by_expert(experts_TK, weights_TK, len(self._experts)):
            gate_up, down = self._experts[expert]
            y_RE = down(self._gated(gate_up, x_TE[rows_R]))
            sums_TE.index_add_(0, rows_R, y_RE * weights_R.unsqueeze(1))
        return sums_TE.to(x_TE.dtype)


def route(logits_TX: torch.Tensor, mixture: Mixture) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, best first, and their weights in float32: two tensors of T x K."""
    probabilities_TX = logits_TX.softmax(-1, dtype=torch.float32)
    weights_TK, experts_TK = probabilities_TX.topk(mixture.num_chosen, -1)
    if mixture.is_normalised:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return experts_TK, weights_TK


def _rows_by_expert(
    experts_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each expert that any row takes, those rows, and their weights."""
    order = experts_TK.flatten().argsort(stable=True)
    counts = torch.bincount(experts_TK.flatten(), minlength=num_experts).tolist()
    rows, weights = order // experts_TK.shape[1], weights_TK.flatten()[order]
    parts = zip(rows.split(counts), weights.split(counts), strict=True)
    for expert, (rows_R, weights_R) in enumerate(parts):
        if len(rows_R):
            yield expert, rows_R, weights_R
