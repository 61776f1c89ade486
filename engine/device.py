"""Devices: which one a configuration means, and whose kernels it computes with."""

import torch

from engine.layers.backend import Backend
from engine.layers.torch_backend import TorchBackend


def make_backend(device: torch.device) -> Backend:
    """Plain torch on a CPU."""
    assert device.type == "cpu"
    return TorchBackend()
