"""CudaDriver: the few CUDA driver calls needed to move KV; the only module that loads libcuda.

CudaDriver uses the driver, not the runtime. Every NVIDIA installation has the driver, whatever CUDA PyTorch was built
with, and memory from `cuMemAlloc` can be shared, whatever allocator PyTorch uses. All calls run in the device's primary
context, which PyTorch uses too. Only calls for the start (`allocate`, `allocate_host`, `load_kernel`) and for the end
(`free`, `close`, `unload_kernel`) may wait for the whole device.

Another thread may be capturing a CUDA graph meanwhile. By default the driver then refuses many calls, event queries
among them, and ends the capture. So every call sets the capture mode in which only its own thread's captures count
(cuThreadExchangeStreamCaptureMode). PyTorch does so around the event queries of its NCCL watchdog.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.transport.base import TransportError

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2
NOT_READY = 600
LAZY_PEER_ACCESS = 1
NON_BLOCKING_STREAM = 1
EVENT_WITHOUT_TIMING = 2
CAPTURE_MODE_THREAD_LOCAL = 1
PORTABLE_HOST_MEMORY = 1
UNIFIED_MEMORY = 4
"""CU_MEMORYTYPE_UNIFIED: the address itself shows whether it is on a device or on the host."""
HANDLE_BYTES = 64

Address = int


class CudaError(TransportError):
    """The CUDA driver refused a call, or is not installed."""


class CudaOutOfMemory(CudaError):
    """The device (or the host, for page-locked memory) has less free memory than requested."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, and the module that holds it."""

    module: int
    function: int


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Rows(ctypes.Structure):
    """CUDA_MEMCPY2D, the argument of cuMemcpy2DAsync_v2."""

    _fields_ = (
        ("src_x_bytes", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_memory_type", ctypes.c_int),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x_bytes", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_memory_type", ctypes.c_int),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


@cache
def _library() -> Any:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CudaError(f"this machine has no CUDA driver: {error}") from error
    _check(library, library.cuInit(0), "cuInit")
    return library


class CudaDriver:
    """One device. Threads may share it; each call makes the device's context current."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._cuda = _library()
        handle, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._do("cuDeviceGet", ctypes.byref(handle), device)
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)

    def allocate(self, num_bytes: int) -> Address:
        """Zeroed device memory. CudaOutOfMemory if there is too little."""
        address = ctypes.c_uint64()
        self._in_context("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._in_context("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        self._in_context("cuCtxSynchronize")
        return address.value

    def free(self, address: Address) -> None:
        self._in_context("cuMemFree_v2", ctypes.c_uint64(address))

    def allocate_host(self, num_bytes: int) -> Address:
        """Page-locked host memory, which a device copies from and to without the processor; not zeroed.

        May wait for the device, so call it at the start.
        """
        address = ctypes.c_void_p()
        flags = ctypes.c_uint(PORTABLE_HOST_MEMORY)
        self._in_context("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(num_bytes), flags)
        return address.value or 0

    def free_host(self, address: Address) -> None:
        self._in_context("cuMemFreeHost", ctypes.c_void_p(address))

    def share(self, address: Address) -> bytes:
        """A handle with which another process of this host can open memory from `allocate`."""
        handle = _IpcHandle()
        self._in_context("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> Address:
        """Opens another process's memory, which may be on another device if the two can reach each other."""
        address = ctypes.c_uint64()
        by_value = _IpcHandle.from_buffer_copy(handle)
        flags = ctypes.c_uint(LAZY_PEER_ACCESS)
        self._in_context("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, flags)
        return address.value

    def close(self, address: Address) -> None:
        """Undoes `open`."""
        self._in_context("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def size_of(self, address: Address) -> int:
        """Bytes of the allocation that begins at `address`, ours or opened."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._in_context(
            "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        )
        return size.value - (address - base.value)

    def make_current(self) -> None:
        """Makes the device's context current in the calling thread, for libraries that use the current context."""
        self._do("cuCtxSetCurrent", self._context)

    def make_stream(self) -> int:
        stream = ctypes.c_void_p()
        self._in_context("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING_STREAM))
        return stream.value or 0

    def copy(self, to: Address, source: Address, num_bytes: int, stream: int) -> None:
        """Queues a copy between any two addresses of devices or page-locked host memory."""
        self._in_context(
            "cuMemcpyAsync",
            ctypes.c_uint64(to),
            ctypes.c_uint64(source),
            ctypes.c_size_t(num_bytes),
            ctypes.c_void_p(stream),
        )

    def copy_rows(
        self,
        to: Address,
        source: Address,
        row_nbytes: int,
        num_rows: int,
        to_pitch: int,
        source_pitch: int,
        stream: int,
    ) -> None:
        """Queues a copy of rows of `row_nbytes` bytes at the given pitches, which are at least `row_nbytes` and below
        2^31.

        Raises CudaError also if a device does not accept these pitches. Then nothing is queued.
        """
        rows = _Rows(
            src_memory_type=UNIFIED_MEMORY,
            src_device=source,
            src_pitch=source_pitch,
            dst_memory_type=UNIFIED_MEMORY,
            dst_device=to,
            dst_pitch=to_pitch,
            width_bytes=row_nbytes,
            height=num_rows,
        )
        self._in_context("cuMemcpy2DAsync_v2", ctypes.byref(rows), ctypes.c_void_p(stream))

    def load_kernel(self, ptx: bytes, name: str) -> Kernel:
        """Compiles a kernel for this device. May wait for the device, so call it at the start."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._in_context("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(ptx))
        kernel_name = ctypes.c_char_p(name.encode())
        try:
            self._in_context("cuModuleGetFunction", ctypes.byref(function), module, kernel_name)
        except CudaError:
            with suppress(CudaError):
                self._in_context("cuModuleUnload", module)
            raise
        return Kernel(module.value or 0, function.value or 0)

    def unload_kernel(self, kernel: Kernel) -> None:
        self._in_context("cuModuleUnload", ctypes.c_void_p(kernel.module))

    def launch(
        self, kernel: Kernel, num_blocks: int, num_threads: int, argument: npt.NDArray[np.uint64], stream: int
    ) -> None:
        """Queues a kernel whose only argument is a struct. The struct is read before this returns."""
        arguments = (ctypes.c_void_p * 1)(argument.ctypes.data)
        grid = [ctypes.c_uint(size) for size in (num_blocks, 1, 1, num_threads, 1, 1)]
        shared_nbytes = ctypes.c_uint(0)
        self._in_context(
            "cuLaunchKernel",
            ctypes.c_void_p(kernel.function),
            *grid,
            shared_nbytes,
            ctypes.c_void_p(stream),
            arguments,
            None,
        )

    def record(self, stream: int) -> int:
        """Returns an event that completes when everything queued so far is done."""
        event = ctypes.c_void_p()
        self._in_context("cuEventCreate", ctypes.byref(event), ctypes.c_uint(EVENT_WITHOUT_TIMING))
        try:
            self._in_context("cuEventRecord", event, ctypes.c_void_p(stream))
        except CudaError:
            with suppress(CudaError):
                self.drop(event.value or 0)
            raise
        return event.value or 0

    def is_over(self, event: int) -> bool:
        """Whether the event has completed. Raises CudaError if work before the event failed."""
        status = self._call("cuEventQuery", ctypes.c_void_p(event))
        if status == NOT_READY:
            return False
        _check(self._cuda, status, "cuEventQuery")
        return True

    def drop(self, event: int) -> None:
        self._in_context("cuEventDestroy_v2", ctypes.c_void_p(event))

    def wait(self, stream: int) -> None:
        """Waits until all work queued on the stream is done."""
        self._in_context("cuStreamSynchronize", ctypes.c_void_p(stream))

    def drop_stream(self, stream: int) -> None:
        self._in_context("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def _in_context(self, name: str, *arguments: Any) -> None:
        _check(self._cuda, self._call(name, *arguments), name)

    def _call(self, name: str, *arguments: Any) -> int:
        self.make_current()
        mode = ctypes.c_int(CAPTURE_MODE_THREAD_LOCAL)
        self._do("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        call: Callable[..., int] = getattr(self._cuda, name)
        try:
            return call(*arguments)
        finally:  # `mode` now holds this thread's previous mode
            self._do("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def _do(self, name: str, *arguments: Any) -> None:
        _check(self._cuda, getattr(self._cuda, name)(*arguments), name)


def _check(library: Any, status: int, name: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    library.cuGetErrorString(status, ctypes.byref(text))
    kind = CudaOutOfMemory if status == OUT_OF_MEMORY else CudaError
    raise kind(f"{name}: {(text.value or b'unknown error').decode()} ({status})")
