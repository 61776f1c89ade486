"""CompileAhead: the kernels of a model's steps, compiled on threads while its weights load.

An outline of the model, whose tensors have no memory, rehearses the same steps as the model will. Each kernel
that the outline launches is compiled, but not run. Triton keeps the kernel in memory and on disk for later
launches. Compiler and assembler release Python's lock nearly all the time, so threads are enough, and weights
load meanwhile.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from triton import AsyncCompileMode, FutureKernel
from triton.runtime.jit import JITFunction

from engine.batch import StepLimits
from engine.gpu.device_parts import make_device_parts
from engine.gpu.graphs import Repeater
from engine.kv_cache import KVPool
from engine.loading.loader import LoadedModel

logger = logging.getLogger(__name__)

PARSING = threading.Lock()


class CompileAhead:
    """A context manager that compiles while it is open; on exit it waits until everything is compiled.

    After an exception it waits only for kernels under way, a few seconds. A kernel that fails here fails again in the
    worker's rehearsal, which then reports the error.
    """

    def __init__(self, rehearse: Callable[[], None], load: Callable[[Any], None], num_threads: int) -> None:
        """`rehearse` launches the kernels to compile, on a separate thread; `load` receives each compiled kernel."""
        self._load = load
        self._compilers = ThreadPoolExecutor(num_threads, thread_name_prefix="compiler")
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, args=(rehearse,), name="compile ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._is_given_up = True
            self._compilers.shutdown(wait=False, cancel_futures=True)
        self._thread.join()
        self._compilers.shutdown()

    def _run(self, rehearse: Callable[[], None]) -> None:
        try:
            with (
                parsing_alone(),
                compiling_only() as kernels,
                AsyncCompileMode(self._compilers, ignore_errors=True),
            ):
                rehearse()
            compiled = {id(kernel): kernel for kernel in kernels if isinstance(kernel, FutureKernel)}
            for _ in self._compilers.map(lambda kernel: self._load(kernel.result()), compiled.values()):
                pass
        except Exception:
            if not self._is_given_up:
                logger.warning(
                    "could not compile kernels before they are needed; each kernel is compiled at its first use",
                    exc_info=True,
                )


@contextmanager
def parsing_alone() -> Iterator[None]:
    """Within the context, one thread at a time parses a kernel's source.

    Python up to 3.11.7, and 3.12 up to 3.12.1, may fail when several threads parse: "AST constructor recursion depth
    mismatch" (CPython issue 106905).
    """
    parse = JITFunction.parse

    def parse_alone(self: Any) -> Any:
        with PARSING:
            return parse(self)

    JITFunction.parse = parse_alone
    try:
        yield
    finally:
        JITFunction.parse = parse


@contextmanager
def compiling_only() -> Iterator[list[Any]]:
    """Within the context, this thread's launches are compiled and not run; the list receives their kernels.

    Launches of other threads run as usual.
    """
    kernels: list[Any] = []
    run, thread = JITFunction.run, threading.get_ident()

    def compile_or_run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return kernels[-1]

    JITFunction.run = compile_or_run
    try:
        yield kernels
    finally:
        JITFunction.run = run


def load_on(gpu: torch.device) -> Callable[[Any], None]:
    """Returns a function that prepares a kernel for launches on this GPU.

    Otherwise Triton does so at the first launch: it loads the machine code, and Triton 3.6 builds a launcher with gcc.
    """

    def load(kernel: Any) -> None:
        torch.cuda.set_device(gpu)  # the setting is per thread
        assert kernel.run is not None

    return load


def rehearse_outline(
    outline: LoadedModel, block_size: int, limits: StepLimits, num_multiprocessors: int, *, uses_graphs: bool
) -> None:
    """Launches what `DeviceParts.rehearse` and `record` will launch; call it within `compiling_only`.

    Only swapping of small blocks needs another kernel, which is compiled when the worker makes its runner.
    """
    assert outline.device.type == "meta"
    pool = KVPool(2, outline.kv_block_shape(block_size), outline.device)
    parts = make_device_parts(outline, pool, limits, num_multiprocessors)
    with torch.inference_mode():
        parts.rehearse()
        if uses_graphs:
            parts.record(Repeater())
