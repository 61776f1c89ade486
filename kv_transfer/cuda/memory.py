"""Memory that a CUDA device copies from and to: CudaMemory on the device, pinned_array on the host."""

import ctypes
import weakref
from contextlib import suppress
from typing import Any

import numpy as np

from kv_transfer.cuda.driver import Address, CudaDriver
from kv_transfer.transport.base import Bytes, TransportError


class CudaMemory:
    """`num_bytes` zeroed bytes on a device that other processes of this host may open. PyTorch accepts them as a
    tensor.

    Only `free` and the end of the process release it. Its owner calls `free` last, after the tensors over it,
    readers, stagers and NIXL's agents are gone. CUDA does not define what a peer with the memory still open reads
    then; the protocol accepts none of that, since no `End` follows.
    """

    def __init__(self, num_bytes: int, device: int, driver: CudaDriver | None = None) -> None:
        """CudaOutOfMemory if the device has less memory free."""
        self.driver: CudaDriver = driver if driver is not None else CudaDriver(device)
        self.nbytes = num_bytes
        self.address = self.driver.allocate(num_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """uint8 [num_bytes], for `torch.as_tensor`."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def free(self) -> None:
        self.driver.free(self.address)


def pinned_array(num_bytes: int, device: int, driver: CudaDriver | None = None) -> Bytes:
    """uint8 [num_bytes] of host memory that a device reads and writes by itself: whole pages, not zeroed.

    The memory is released with the last array or tensor over it; no copy may be running then. PyTorch's own pinned
    memory is rounded up to a power of two, which may be nearly twice as much.

    CudaOutOfMemory if the host cannot lock so much.
    """
    driver = driver if driver is not None else CudaDriver(device)
    address = driver.allocate_host(num_bytes)
    array: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
    # At the end of the process, the system releases it.
    weakref.finalize(array, _free_host, driver, address).atexit = False
    return array


def _free_host(driver: CudaDriver, address: Address) -> None:
    with suppress(TransportError):  # a lost context has released it
        driver.free_host(address)
