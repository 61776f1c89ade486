"""Workspace: memory that is reused from layer to layer and step to step."""

import torch


class Workspace:
    """A buffer that grows to the largest size ever requested.

    The allocator returns large temporaries to the system after every use. Taking them anew costs page faults, which on
    CPU take longer than the computation.
    """

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._last: tuple[torch.dtype, tuple[int, ...]] | None = None
        self._taken = self._bytes

    def take(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Uninitialised; valid until the next `take`."""
        if self._last != (dtype, shape):
            size = dtype.itemsize
            for dimension in shape:
                size *= dimension
            if size > self._bytes.numel():
                self._bytes = torch.empty(size, dtype=torch.uint8, device=self._bytes.device)
            self._taken = self._bytes[:size].view(dtype).view(shape)
            self._last = dtype, shape
        return self._taken
