"""NixlAgent: one agent of the NIXL library over one pool; the only module that imports NIXL, knows no message.

We call NIXL's extension module, and not its Python layer, because this layer fixes the progress thread's interval. At
that interval, the thread spins, and takes a whole core from the engine.
"""

import importlib
import importlib.metadata
import logging
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from kv_transfer.transport.base import Bytes

logger = logging.getLogger(__name__)

DISTRIBUTIONS = ("nixl-cu12", "nixl-cu13")
"""NIXL's packages, one for each major version of CUDA. Without a GPU, both work alike."""

PROGRESS_INTERVAL_US = 100_000
"""The progress thread wakes on events, and also at this interval. The wake-ups cost 0.1 % of a core."""

RDMA_PORT_STATES = "/sys/class/infiniband/*/ports/*/state"

MemoryKind = Literal["DRAM", "VRAM"]


class NixlError(Exception):
    """NIXL refused or gave up. `is_disconnect`: this has cut the connection to the peer, which ends every read from
    it."""

    def __init__(self, cause: Exception) -> None:
        self.is_disconnect = type(cause).__name__ == "nixlRemoteDisconnectError"
        super().__init__("the connection broke" if self.is_disconnect else str(cause))


@dataclass(frozen=True, slots=True)
class NixlMemory:
    """A pool as the hardware sees it: a range of addresses in this process or on one of its devices."""

    address: int
    nbytes: int
    kind: MemoryKind = "DRAM"
    device: int = 0
    """CUDA's number of the device; 0 for DRAM."""

    @classmethod
    def of(cls, pool: Bytes) -> "NixlMemory":
        """The bytes of an array, which must outlive every agent over them."""
        assert pool.flags.c_contiguous, "a pool must be one contiguous run of bytes"
        assert pool.flags.writeable, "a pool must be writable"
        return cls(pool.ctypes.data, pool.nbytes)


@cache
def load_nixl() -> tuple[Any, str]:
    """NIXL's extension module, which has no type stubs, and NIXL's version. ConfigError if NIXL is not installed."""
    failures: list[str] = []
    for distribution in DISTRIBUTIONS:
        try:
            module = importlib.import_module(distribution.replace("-", "_") + "._bindings")
        except ImportError as error:
            failures.append(str(error))
        else:
            return module, importlib.metadata.version(distribution)
    raise ConfigError(
        "the KV transport nixl needs the NIXL library: pip install 'baton[nixl]' ("
        + "; ".join(failures)
        + ")"
    )


def nixl_is_available() -> bool:
    """Whether NIXL can be imported. If it can, the first call takes some 0.1 s."""
    try:
        load_nixl()
    except ConfigError:
        return False
    return True


def has_rdma() -> bool:
    """Whether this machine has an active port on an RDMA network.

    Whether UCX supports the network is not checked. For example, a port of AWS EFA counts, too: only the name of its
    driver (`device/driver`) would show that it is EFA, and this function does not read that name.
    """
    return any("ACTIVE" in file.read_text() for file in Path("/").glob(RDMA_PORT_STATES.lstrip("/")))


class NixlAgent:
    """Owns NIXL's state for one pool. Never listens beyond loopback: with RDMA it uses no TCP at all, without RDMA
    only `lo`.

    UCX's environment variables UCX_TLS and UCX_NET_DEVICES override the settings that ensure this. UCX has no
    authentication.
    """

    def __init__(self, memory: NixlMemory, *, has_progress_thread: bool) -> None:
        """NixlError if UCX cannot be set up. Connecting peers need the progress thread; our own reads do not."""
        self._nixl, _ = load_nixl()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = has_progress_thread
        config.pthrDelay = PROGRESS_INTERVAL_US
        config.useListenThread = False  # it would bind every interface
        self.name = uuid.uuid4().hex
        self._memory = memory
        self._segment = getattr(self._nixl, f"{memory.kind}_SEG")
        transports = "TLS=^tcp" if has_rdma() else "NET_DEVICES=lo"
        try:
            self._agent = self._nixl.nixlAgent(self.name, config)
            self._backend = self._agent.createBackend("UCX", {"engine_config": transports})
            self._registered = self._nixl.nixlRegDList(
                self._segment, [(memory.address, memory.nbytes, memory.device, "")]
            )
            self._agent.registerMem(self._registered, [self._backend])
        except Exception as error:  # the bindings' exceptions have no common base
            raise NixlError(error) from error

    def metadata(self) -> bytes:
        """What another agent needs to read this one's pool."""
        return bytes(self._agent.getLocalMD())

    def connect(self, metadata: bytes) -> None:
        """Connects to the agent that made `metadata`. NixlError if it is unreachable. Check the metadata before the
        call, since damaged metadata may end this process."""
        self._do(self._agent.loadRemoteMD, metadata)

    def disconnect(self, peer: str) -> None:
        """Ends the connection to that agent. No read from it may be running."""
        self._do(self._agent.invalidateRemoteMD, peer)

    def prepare(
        self,
        peer: str,
        theirs: NixlMemory,
        remote: npt.NDArray[np.int64],
        local: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> int:
        """Prepares a read of several spans; returns the read's handle. Span i has `lengths[i]` bytes. It is copied from
        offset `remote[i]` of the peer's pool to offset `local[i]` of ours. NixlError if NIXL refuses."""
        ours = self._descriptors(self._memory, local, lengths)
        segment = getattr(self._nixl, f"{theirs.kind}_SEG")
        return int(
            self._do(
                self._agent.createXferReq,
                self._nixl.NIXL_READ,
                self._nixl.nixlXferDList(self._segment, ours),
                self._nixl.nixlXferDList(segment, self._descriptors(theirs, remote, lengths)),
                peer,
                b"",
                [self._backend],
            )
        )

    def start(self, handle: int) -> bool:
        """Begins a prepared read; returns whether it has already ended. On one host, this call copies the bytes."""
        return self._is_over(self._do(self._agent.postXferReq, handle, b""))

    def advance(self, handle: int) -> bool:
        """Advances reads; returns whether this one has ended. NixlError if it failed."""
        return self._is_over(self._do(self._agent.getXferStatus, handle))

    def release(self, handle: int) -> None:
        """Forgets a read. If the read has not ended, NIXL claims to cancel it, but it continues. Only `close` ends
        it."""
        self._do(self._agent.releaseXferReq, handle)

    def close(self) -> None:
        """Ends the agent. When this returns, it neither reads nor writes the pool any more. Release its reads first."""
        try:
            self._do(self._agent.deregisterMem, self._registered, [self._backend])
        except NixlError as error:
            reason = str(error)  # a log record with the error itself would keep the agent alive
            logger.warning("NIXL does not release a pool: %s", reason)
        del self._agent  # its destructor closes every connection, and releases the rest

    def _is_over(self, status: Any) -> bool:
        return bool(status == self._nixl.NIXL_SUCCESS)

    @staticmethod
    def _descriptors(
        memory: NixlMemory, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint64]:
        rows = np.empty((len(offsets), 3), np.uint64)
        rows[:, 0] = offsets.astype(np.uint64) + np.uint64(memory.address)
        rows[:, 1] = lengths
        rows[:, 2] = memory.device
        return rows

    @staticmethod
    def _do(call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:  # the bindings' exceptions have no common base
            raise NixlError(error) from error
