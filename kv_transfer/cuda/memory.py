"""Memory that a CUDA device copies from and to: CudaMemory on the device, PinnedBuffer and pinned_array on the host."""

import ctypes
import weakref
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from kv_transfer.cuda.copies import CopyDriver
from kv_transfer.cuda.driver import Address, CudaDriver
from kv_transfer.transport.base import Bytes, TransportError


class Driver(CopyDriver, Protocol):
    """The part of CudaDriver that moving KV needs."""

    device: int

    def allocate(self, num_bytes: int) -> Address: ...
    def free(self, address: Address) -> None: ...
    def allocate_host(self, num_bytes: int) -> Address: ...
    def free_host(self, address: Address) -> None: ...
    def share(self, address: Address) -> bytes: ...
    def open(self, handle: bytes) -> Address: ...
    def close(self, address: Address) -> None: ...
    def size_of(self, address: Address) -> int: ...
    def make_current(self) -> None: ...
    def make_stream(self) -> int: ...
    def record(self, stream: int) -> int: ...
    def is_over(self, event: int) -> bool: ...
    def drop(self, event: int) -> None: ...
    def wait(self, stream: int) -> None: ...
    def drop_stream(self, stream: int) -> None: ...


class CudaMemory:
    """`num_bytes` zeroed bytes on a device that other processes of this host may open. PyTorch accepts it as a
    tensor.

    Only `free` and the end of the process release it. Its owner calls `free` last, after the tensors over it,
    readers, stagers and NIXL's agents are gone. CUDA does not define what a peer with the memory still open reads
    then; the protocol accepts none of that, since no `End` follows.
    """

    def __init__(self, num_bytes: int, device: int, driver: Driver | None = None) -> None:
        """CudaOutOfMemory if the device has not got so much."""
        self.driver: Driver = driver if driver is not None else CudaDriver(device)
        self.nbytes = num_bytes
        self.address = self.driver.allocate(num_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """uint8 [num_bytes], for `torch.as_tensor`."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def free(self) -> None:
        self.driver.free(self.address)


class PinnedBuffer:
    """`nbytes` bytes of host memory that a device reads and writes by itself; `array` is uint8 [nbytes] over them."""

    def __init__(self, num_bytes: int, driver: Driver) -> None:
        """CudaError if the host cannot lock so much memory."""
        self._driver = driver
        self.nbytes = num_bytes
        self.address = driver.allocate_host(num_bytes)
        self.array = _array_at(self.address, num_bytes)

    def free(self) -> None:
        """Releases the buffer; no copy may be running, and `array` must not be used any more."""
        self._driver.free_host(self.address)


def pinned_array(num_bytes: int, device: int, driver: Driver | None = None) -> Bytes:
    """uint8 [num_bytes] of the host that a device reads and writes by itself: whole pages, not zeroed.

    It is given back with the last array or tensor over it; no copy may be under way then. What PyTorch pins is rounded
    up to a power of two, which may be nearly twice as much.

    CudaOutOfMemory if the host has not got so much to lock.
    """
    driver = driver if driver is not None else CudaDriver(device)
    address = driver.allocate_host(num_bytes)
    array = _array_at(address, num_bytes)
    # When the process ends, the system takes it.
    weakref.finalize(array, _free_host, driver, address).atexit = False
    return array


def _array_at(address: Address, num_bytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def _free_host(driver: Driver, address: Address) -> None:
    with suppress(TransportError):  # a context that is lost has taken it along
        driver.free_host(address)
