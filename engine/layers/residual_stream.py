"""ResidualStream: the sum of a decoder's branches, each of which begins or ends with a norm; knows no branch.

Shape suffixes: T tokens of a step, E hidden size, I input features of a projection.
"""

import torch

from engine.collectives import Collectives
from engine.layers.backend import Activations, Backend, LinearLayer, MixtureLayer


class ResidualStream:
    """The stream of one step.

    A branch ends with a projection or with a mixture of experts, and perhaps a norm of its result. The branch's
    result is added at once if there is such a norm. It is also added at once if the backend can multiply and add in
    one launch, and there is only one rank. Otherwise the result is added together with the next norm.
    """

    def __init__(self, rows_TE: torch.Tensor, backend: Backend, collectives: Collectives, eps: float) -> None:
        """Overwrites `rows_TE`, the first value of the stream."""
        self._rows_TE = rows_TE
        self._branch_TE: torch.Tensor | None = None
        """The result of the last branch, if it is not added yet."""
        self._backend = backend
        self._collectives = collectives
        self._eps = eps

    def normed(self, weight_E: torch.Tensor) -> Activations:
        """RMSNorm of the sum so far. Use the result before the next branch is added."""
        branch_TE, self._branch_TE = self._branch_TE, None
        if branch_TE is None:
            return self._backend.rms_norm(self._rows_TE, weight_E, self._eps)
        return self._backend.add_rms_norm(branch_TE, self._rows_TE, weight_E, self._eps)

    def keep(self, rows_R: torch.Tensor) -> None:
        """Continues with only these rows. No branch may be waiting to be added."""
        assert self._branch_TE is None, "a branch that was not added has all rows"
        self._rows_TE = self._rows_TE[rows_R]

    def normed_rows(self, weight_E: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the sum so far as plain numbers, for a branch that does not begin with a projection."""
        return self._backend.normed_rows(self.total(), weight_E, self._eps)

    def rows(self) -> torch.Tensor:
        """T x E: the sum so far, for a branch that begins without a norm.

        All branches before must end with a norm.
        """
        assert self._branch_TE is None, "this branch begins with a norm"
        return self._rows_TE

    def add_normed(self, linear: LinearLayer, x_TI: Activations, weight_E: torch.Tensor) -> None:
        """Adds the RMSNorm of the sum of all ranks' `linear(x_TI)`."""
        assert self._branch_TE is None, "the branch before ends without a norm"
        branch_TE = linear(x_TI)
        self._collectives.all_reduce_(branch_TE)
        self._backend.add_normed(branch_TE, self._rows_TE, weight_E, self._eps)

    def add(self, linear: LinearLayer, x_TI: Activations) -> None:
        """Adds the sum of all ranks' `linear(x_TI)`."""
        assert self._branch_TE is None, "each branch begins with a norm"
        if self._collectives.size == 1 and self._backend.try_add(linear, x_TI, self._rows_TE):
            return
        self.add_parts(linear(x_TI))

    def add_mixture(self, mixture: MixtureLayer, x_TE: torch.Tensor) -> None:
        """Adds the sum of all ranks' `mixture(x_TE)`."""
        assert self._branch_TE is None, "each branch begins with a norm"
        if self._collectives.size > 1 or not mixture.try_add(x_TE, self._rows_TE):
            self.add_parts(mixture(x_TE))

    def add_parts(self, branch_TE: torch.Tensor) -> None:
        """Adds the sum of all ranks' `branch_TE`, and overwrites `branch_TE`."""
        assert self._branch_TE is None, "each branch begins with a norm"
        self._branch_TE = branch_TE
        self._collectives.all_reduce_(branch_TE)

    def total(self) -> torch.Tensor:
        """T x E: the sum of all branches so far."""
        branch_TE, self._branch_TE = self._branch_TE, None
        return self._rows_TE if branch_TE is None else self._rows_TE.add_(branch_TE)
