"""gpu_of: which GPU computes what tensors of a device are part of; knows no kernel."""

import torch


def gpu_of(device: torch.device) -> torch.device | None:
    """A GPU itself; for tensors without memory, the one that this thread computes on, if there is any; None for a CPU.

    So an outline of a model (`engine.loading.loader.outline_model`) asks for the kernels that the model will ask for.
    """
    if device.type == "cuda":
        return device
    if device.type == "meta" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return None
