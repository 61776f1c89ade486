"""Devices: the device of a rank; a device's GPU, memory and progress; copies of arrays to and from it."""

from importlib.util import find_spec
from typing import Any, Protocol

import numpy.typing as npt
import torch

from baton.config import EngineConfig
from baton.errors import ConfigError


class Mark(Protocol):
    """A point in a device's queue; a torch.cuda.Event is one."""

    def synchronize(self) -> None:
        """Waits until the device has reached this point."""
        ...


def rank_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """The device of a rank: rank i gets the i-th GPU that the process sees.

    ConfigError if there is no such device, or if Triton is missing.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"engine.device: got 'cuda', but PyTorch {torch.__version__} sees no CUDA device; use 'cpu', or install "
            "the NVIDIA driver and a build of PyTorch with CUDA"
        )
    if rank >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.tensor_parallel: rank {rank} needs a GPU of its own, and this process sees "
            f"{torch.cuda.device_count()}; lower tensor_parallel, or expose more GPUs (CUDA_VISIBLE_DEVICES)"
        )
    if find_spec("triton") is None:
        raise ConfigError("engine.device: got 'cuda', which needs Triton: pip install triton")
    return torch.device("cuda", rank)


def gpu_of(device: torch.device) -> torch.device | None:
    """The GPU for which kernels are compiled: `device` itself if it is a GPU, this thread's current GPU if `device` is
    `meta`, else None.

    An outline of a model (`engine.loading.loader.outline_model`) consists of meta tensors, but launches the
    model's own kernels.
    """
    if device.type == "cuda":
        return device
    if device.type == "meta" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return None


def device_memory(device: torch.device) -> dict[str, int]:
    """A GPU's memory in bytes, by kind; empty for a CPU. May be called from any thread."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "total": total,
        "free": free,
        "reserved": torch.cuda.memory_reserved(device),
        "allocated": torch.cuda.memory_allocated(device),
    }


def pinned(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array in pinned memory, for an asynchronous copy to a GPU; a view if the device is not a GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, in pinned memory and asynchronous if the device is a GPU; zeros for a meta tensor."""
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def mark(device: torch.device) -> Mark | None:
    """The point after all work launched on the current stream so far; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
