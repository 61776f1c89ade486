"""Workspace: memory that all layers and steps reuse."""

import torch


class Workspace:
    """A buffer that grows to the largest size ever requested.

    Without it, the allocator returns large temporary tensors to the system after every use. New memory costs
    page faults, which on a CPU take longer than the computation.
    """

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._last: tuple[torch.dtype, tuple[int, ...]] | None = None
        self._taken = self._bytes

    def borrow(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Returns uninitialized memory, which is valid until the next `borrow`."""
        if self._last != (dtype, shape):
            size = dtype.itemsize
            for dimension in shape:
                size *= dimension
            if size > self._bytes.numel():
                self._bytes = torch.empty(size, dtype=torch.uint8, device=self._bytes.device)
            self._taken = self._bytes[:size].view(dtype).view(shape)
            self._last = dtype, shape
        return self._taken
