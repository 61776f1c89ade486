"""gpu_of: which GPU computes with tensors of a device; knows no kernel."""

import torch


def gpu_of(device: torch.device) -> torch.device | None:
    """A GPU itself; for meta tensors, the GPU that this thread computes on, if there is one; None for a CPU.

    So an outline of a model (`engine.loading.loader.outline_model`) launches the same kernels as the model.
    """
    if device.type == "cuda":
        return device
    if device.type == "meta" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return None
