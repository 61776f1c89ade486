"""A stream's copies without a device: from host memory to host memory."""

import torch

from engine.device import Mark
from engine.loading.weight_stream import CudaCopies


class Done:
    def synchronize(self) -> None:
        pass


class HostCopies(CudaCopies):
    """Copies within host memory, which are done when `start` returns."""

    def __init__(self) -> None:
        pass  # needs neither a device nor a stream

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def start(self, to: torch.Tensor, source: torch.Tensor) -> Mark:
        to.copy_(source)
        return Done()

    def order_after_copies(self, tensor: torch.Tensor) -> None:
        pass
