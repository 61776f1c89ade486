"""The description of a pool for peers that read it through NIXL, and its checks; knows no library.

A description is sealed, since NIXL may crash over damaged metadata. The seal is no signature: the channel that
carries descriptions authenticates peers.
"""

import ctypes
import os
from dataclasses import dataclass

import xxhash

from baton.errors import WireError
from baton.messages.wire import Codec
from kv_transfer.transport.base import MAX_DESCRIPTION_BYTES, TransportError, host_id
from kv_transfer.transport.nixl_agent import NixlMemory

MAGIC = b"BATONIX1"
"""The first bytes of a description; the last one of them is the version of the format."""

SEAL_BYTES = 8


@dataclass(frozen=True, slots=True)
class Description:
    """Describes a pool, the process that owns it, and how NIXL reaches this process."""

    nixl_version: str
    host: str
    pid: int
    has_rdma: bool
    address: int
    nbytes: int
    is_on_device: bool
    device: int
    agent: str
    metadata: bytes

    @property
    def memory(self) -> NixlMemory:
        return NixlMemory(self.address, self.nbytes, "VRAM" if self.is_on_device else "DRAM", self.device)

    def check_reachable(self, host: str, has_rdma: bool) -> None:
        """TransportError unless the pool's memory can be read from this host without the help of its owner.

        Otherwise UCX would ask the owner over TCP. That is slower than `zmq_tcp`. And if the reader dies before the
        answer, UCX aborts the owner's process.
        """
        if self.host != host:
            if not (has_rdma and self.has_rdma):
                raise TransportError("the pool is on another host, and not both hosts have RDMA")
        elif not self.is_on_device and not has_rdma:
            check_readable(self.pid, self.address)


CODEC: Codec[Description] = Codec(Description, max_bytes=MAX_DESCRIPTION_BYTES - len(MAGIC) - SEAL_BYTES)


def encode(description: Description) -> bytes:
    data = CODEC.encode(description)
    return MAGIC + xxhash.xxh3_64_digest(data) + data


def decode(data: bytes) -> Description:
    """The description in `data`; a TransportError says what is wrong with it."""
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise TransportError(
            f"the pool description has {len(data)} bytes; at most {MAX_DESCRIPTION_BYTES} are allowed"
        )
    magic, seal, body = data[: len(MAGIC)], data[len(MAGIC) :][:SEAL_BYTES], data[len(MAGIC) + SEAL_BYTES :]
    if magic != MAGIC or seal != xxhash.xxh3_64_digest(body):
        raise TransportError(
            f"the peer's pool description is not one of NIXL, or is damaged ({len(data)} bytes)"
        )
    try:
        description = CODEC.decode(body)
    except WireError as error:
        raise TransportError(f"cannot read the peer's NIXL pool description: {error}") from error
    if not (
        0 < description.address < description.address + description.nbytes <= 2**64
        and 0 < description.pid < 2**31
        and 0 <= description.device < 2**31
    ):
        raise TransportError("the peer's NIXL pool description has an invalid memory range")
    return description


def this_host() -> str:
    """Names the running kernel and our namespaces: processes with equal names agree on what a pid and `lo` mean."""
    return f"{host_id()}/{os.stat('/proc/self/ns/net').st_ino}"


class IoVec(ctypes.Structure):
    """C's struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def check_readable(pid: int, address: int) -> None:
    """Reads one byte of another process's memory; TransportError if the system forbids it."""
    byte = ctypes.create_string_buffer(1)
    local, remote = IoVec(ctypes.addressof(byte), 1), IoVec(address, 1)
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    iovec, count = ctypes.POINTER(IoVec), ctypes.c_ulong
    read.argtypes = (ctypes.c_int, iovec, count, iovec, count, count)
    read.restype = ctypes.c_ssize_t
    if read(pid, local, 1, remote, 1, 0) != 1:
        reason = os.strerror(ctypes.get_errno())
        raise TransportError(f"cannot read the memory of process {pid}: {reason}")
