"""ResidualStream: the sum of a decoder's branches, which begin or end with a norm; knows no branch.

Shape suffixes: T tokens of a step, E hidden size, I input features of a projection.
"""

import torch

from engine.collectives import Collectives
from engine.layers.backend import Activations, Backend, LinearLayer


class ResidualStream:
    """The stream of one step.

    A branch ends with a projection. Its result is added at once if it is normed first, or if the backend can do both in
    one launch and no other rank has a part of it; otherwise it is added together with the next norm.
    """

    def __init__(self, rows_TE: torch.Tensor, backend: Backend, collectives: Collectives, eps: float) -> None:
        """`rows_TE` is overwritten."""
        self._rows_TE = rows_TE
        self._branch_TE: torch.Tensor | None = None
        """Not added yet."""
        self._backend = backend
        self._collectives = collectives
        self._eps = eps

    def normed(self, weight_E: torch.Tensor) -> Activations:
        """RMSNorm of the sum so far; use it before anything is added."""
        branch_TE, self._branch_TE = self._branch_TE, None
        if branch_TE is None:
            return self._backend.rms_norm(self._rows_TE, weight_E, self._eps)
        return self._backend.add_rms_norm(branch_TE, self._rows_TE, weight_E, self._eps)

    def keep(self, rows_R: torch.Tensor) -> None:
        """Goes on with these rows alone; a branch must have begun with all of them."""
        assert self._branch_TE is None, "a branch that was not added has all rows"
        self._rows_TE = self._rows_TE[rows_R]

    def normed_rows(self, weight_E: torch.Tensor) -> torch.Tensor:
        """The same as plain numbers, for a branch that does not begin with a projection."""
        return self._backend.normed_rows(self.total(), weight_E, self._eps)

    def rows(self) -> torch.Tensor:
        """T x E: the sum so far, for a branch that begins without a norm; every branch before must have been normed."""
        assert self._branch_TE is None, "this branch begins with a norm"
        return self._rows_TE

    def add_normed(self, linear: LinearLayer, x_TI: Activations, weight_E: torch.Tensor) -> None:
        """Adds the RMSNorm of the sum of every rank's `linear(x_TI)`."""
        assert self._branch_TE is None, "the branch before ends without a norm"
        branch_TE = linear(x_TI)
        self._collectives.all_reduce_(branch_TE)
        self._backend.add_normed(branch_TE, self._rows_TE, weight_E, self._eps)

    def add(self, linear: LinearLayer, x_TI: Activations) -> None:
        """Adds the sum of every rank's `linear(x_TI)`."""
        assert self._branch_TE is None, "each branch begins with a norm"
        if self._collectives.size == 1 and self._backend.adds(linear, x_TI, self._rows_TE):
            return
        self.add_parts(linear(x_TI))

    def add_parts(self, branch_TE: torch.Tensor) -> None:
        """Adds the sum of every rank's `branch_TE`, which is overwritten."""
        assert self._branch_TE is None, "each branch begins with a norm"
        self._branch_TE = branch_TE
        self._collectives.all_reduce_(branch_TE)

    def total(self) -> torch.Tensor:
        """T x E."""
        branch_TE, self._branch_TE = self._branch_TE, None
        return self._rows_TE if branch_TE is None else self._rows_TE.add_(branch_TE)
