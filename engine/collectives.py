"""Collectives: calls in which tensor-parallel ranks of a worker exchange tensors; knows no model or process.

Every rank must make the same calls in the same order: if one rank skips a call, the other ranks wait for it.
CPUs use gloo on the loopback interface. GPUs use NCCL. An NCCL call only queues work on the current stream,
so CUDA graphs may contain such calls.
"""

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

LOOPBACK = "lo"
CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits for NCCL. NCCL itself waits for the other ranks, and until all CUDA graphs that contain NCCL
calls are freed."""

# torch 2.13 renamed the function, and warns about the old name.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives(Protocol):
    """The calls that one rank makes.

    If another rank has ended or is late, a call raises RuntimeError, which names the calling rank.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def all_reduce_(self, x: torch.Tensor) -> None:
        """Replaces `x` by the sum of all ranks' `x`, with the same bits on each rank. `x` is contiguous."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The `x` of all ranks, concatenated along the last dimension in rank order.

        `x` has the same shape on each rank.
        """
        ...

    def broadcast_(self, x: torch.Tensor) -> None:
        """Replaces `x` by rank 0's `x`, which is contiguous."""
        ...

    def silent(self) -> AbstractContextManager[None]:
        """A context for one rank's rehearsal: calls return at once, with results of the right shape."""
        ...


class SingleRank:
    """The only rank of a worker. Every call returns at once."""

    rank = 0
    size = 1

    def all_reduce_(self, x: torch.Tensor) -> None:
        """Leaves `x` as it is: with one rank, it is the sum already."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def broadcast_(self, x: torch.Tensor) -> None:
        """Leaves `x` as it is: rank 0 is the only rank."""

    def silent(self) -> AbstractContextManager[None]:
        """A context without effect, since calls never wait."""
        return nullcontext()


SINGLE_RANK: Collectives = SingleRank()


class SilentRank(SingleRank):
    """One of several ranks, in a rehearsal without the others: results have the right shape, but no meaning."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """As many copies of `x` as there are ranks."""
        return torch.cat([x] * self.size, -1)


class TorchCollectives:
    """Collectives over torch.distributed's default group, which exists once in a process.

    Sums are in the tensor's dtype. gloo and NCCL both support bfloat16, and round once for each rank that is
    added.
    """

    def __init__(
        self, meeting_file: int, rank: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        """`meeting_file`: the descriptor of a file that all ranks have open, and through which they connect.

        With a file, there is no port that another process could take. The descriptor must stay open, since
        torch reopens the file by the descriptor's name. The ranks connect only in `connect`."""
        assert 0 <= rank < size > 1, f"rank {rank} of {size}"
        self.rank = rank
        self.size = size
        self._meeting_file = meeting_file
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._is_silent = False

    def connect(self) -> None:
        """Connects the ranks; returns when every rank has called this. RuntimeError if a rank is too late."""
        # All ranks are on this host, so they connect over its loopback interface. The libraries read the name
        # of the interface only from the environment. A value that is already set is kept.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, LOOPBACK)
        is_cuda = self._device.type == "cuda"
        excepthook = sys.excepthook  # torch replaces it, so it is restored below
        try:
            dist.init_process_group(
                "nccl" if is_cuda else "gloo",
                store=dist.FileStore(f"/proc/self/fd/{self._meeting_file}", self.size),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.size,
                timeout=self._timeout,
                device_id=self._device if is_cuda else None,  # NCCL connects now, not at the first call
            )
            x = torch.ones(1, device=self._device)
            self.all_reduce_(x)
            assert x.item() == self.size
        except RuntimeError as error:
            raise self._failed("connect", error) from error
        finally:
            sys.excepthook = excepthook

    def all_reduce_(self, x: torch.Tensor) -> None:
        if not self._is_silent:
            self._call("all_reduce", dist.all_reduce, x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_silent:
            return torch.cat([x] * self.size, -1)
        gathered = x.new_empty(self.size, *x.shape)
        self._call("all_gather", _all_gather_single, gathered.view(-1), x.contiguous().view(-1))
        return torch.cat(gathered.unbind(0), -1)

    def broadcast_(self, x: torch.Tensor) -> None:
        if not self._is_silent:
            self._call("broadcast", dist.broadcast, x, 0)

    @contextmanager
    def silent(self) -> Iterator[None]:
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def abort(self) -> None:
        """Ends waiting calls; may be called from any thread, and returns at once. No call may follow.

        On GPUs the waiting calls return without an error, and their results mean nothing. gloo needs no
        abort: when a rank's process ends, the calls of the other ranks raise errors.
        """
        group = dist.group.WORLD
        if group is not None and self._device.type == "cuda":
            # `abort` notifies the device, then waits until the engine has freed its CUDA graphs. So it runs
            # on a thread.
            threading.Thread(target=group.abort, name="abort", daemon=True).start()

    def close(self) -> None:
        """Ends the group.

        No call may be under way, and CUDA graphs that contain calls should be freed before.
        """
        if not dist.is_initialized():
            return
        if self._device.type != "cuda":
            dist.destroy_process_group()
            return
        gc.collect()
        ending = threading.Thread(target=dist.destroy_process_group, name="end of NCCL", daemon=True)
        ending.start()
        ending.join(CLOSE_TIMEOUT_S)
        if ending.is_alive():
            logger.warning("NCCL did not end within %g s; it ends with the process", CLOSE_TIMEOUT_S)

    def _call(self, name: str, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except RuntimeError as error:
            raise self._failed(name, error) from error

    def _failed(self, call: str, error: Exception) -> RuntimeError:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return RuntimeError(f"{call} failed on rank {self.rank} of {self.size}: {first_line}")
