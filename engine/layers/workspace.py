"""Workspace: memory that is reused from layer to layer and step to step; knows nothing of its contents."""

import torch


class Workspace:
    """A buffer that grows to the largest shape ever requested.

    The allocator returns large temporaries to the system after every use. Taking them anew costs page faults, which on
    CPU take longer than the computation.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(0, dtype=dtype, device=device)

    def take(self, *shape: int) -> torch.Tensor:
        """Uninitialised; valid until the next `take`."""
        size = 1
        for dimension in shape:
            size *= dimension
        if size > self._flat.numel():
            self._flat = torch.empty(size, dtype=self._flat.dtype, device=self._flat.device)
        return self._flat[:size].view(shape)
