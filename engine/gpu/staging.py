"""StepStaging: copies a step's int32 arrays to the device, packed, in one copy; knows nothing of their meaning."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 4
"""In elements: sections begin at multiples of 16 bytes."""
NUM_BUFFERS = 3
"""One buffer for each of two steps whose copies may be under way, and one for the step that is being packed."""


@dataclass(frozen=True, slots=True)
class StagedArray:
    """An array and the space reserved for it. Equal capacities put sections at the same places each time."""

    values: npt.NDArray[np.integer]
    capacity: int


class StepStaging:
    """One buffer on the device, which the next step overwrites, and several on the host, pinned for a GPU.

    All copies and all readers of the device's buffer use the same stream.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._hosts = [
            torch.zeros(capacity, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(NUM_BUFFERS)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if self._is_cuda else []
        self._next = 0

    def stage(self, sections: Sequence[StagedArray]) -> list[torch.Tensor]:
        """Queues the copy; returns views of the sections' capacities on the device, valid until the next call.

        Elements between an array's end and its capacity are undefined. Unused capacity is copied, too, except
        in the last section. So put the section that is mostly empty last.
        """
        index, self._next = self._next, (self._next + 1) % NUM_BUFFERS
        if self._is_cuda:
            self._copied[index].synchronize()  # the copy of three steps ago, which ended long ago
        starts, end = [], 0
        for section in sections:
            assert section.values.size <= section.capacity, f"{section.values.size} > {section.capacity}"
            starts.append(end)
            self._arrays[index][end : end + section.values.size] = section.values.reshape(-1)
            used = end + section.values.size
            end += -(-section.capacity // ALIGNMENT) * ALIGNMENT
        assert end <= len(self.buffer), f"a step of {end} integers in a buffer of {len(self.buffer)}"
        self.buffer[:used].copy_(self._hosts[index][:used], non_blocking=True)
        if self._is_cuda:
            self._copied[index].record()
        return [
            self.buffer[start : start + section.capacity]
            for start, section in zip(starts, sections, strict=True)
        ]
