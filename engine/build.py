"""DeviceEngine: one device's part of a worker: model, KV pool, pipeline and connector; knows no other rank."""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from baton.clock import Clock
from baton.config import BatonConfig, SchedulerConfig
from baton.errors import ConfigError
from baton.system.cpus import find_machine
from baton.system.curve import PlaneKeys
from engine.allocator import (
    available_memory,
    keep_freed_memory,
    return_freed_memory,
    returning_freed_memory,
)
from engine.capacity import Capacity, largest_steps, rank_capacity, with_defaults_of
from engine.collectives import Collectives, SilentRank
from engine.device import rank_device
from engine.draft_parts import Draft, load_draft, make_drafter
from engine.drafts import Drafter
from engine.gpu.memory import OutOfGpuMemory
from engine.gpu.memory_wait import MemoryWait, make_memory_wait
from engine.grammars.compiler import GrammarCompiler
from engine.kernels.switches import SWITCHES_VARIABLE, KernelSwitches, set_kernel_switches
from engine.kv_cache import HostBlocks, KVPool
from engine.loading.demands import check_quantization
from engine.loading.loader import LoadedModel, check_fp8, kv_dtype_of, load_model, outline_model
from engine.model_config import check_device, read_architecture
from engine.pipeline import Pipeline, StepLauncher, StreamPipeline, make_pipeline
from engine.runner_parts import make_runner
from engine.step_failures import FailSettled, FailStop
from kv_transfer import CudaMemory, CudaOutOfMemory, SharedMemory
from kv_transfer.connector.worker import KVConnectorWorker

if TYPE_CHECKING:
    from engine.gpu.compiler import Compiler

logger = logging.getLogger(__name__)

MAX_COMPILERS = 8
"""At most this many threads compile kernels. A worker needs about 30 kernels, and each takes half a second or more to
compile. Weights load meanwhile."""

OnProgress = Callable[[str, int, int], None]
"""Called with the name of the present activity, the amount that is done, and the total amount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEngine:
    """One rank's device: model, KV pool and connector, and how to make its pipeline."""

    model: LoadedModel
    capacity: Capacity
    pool: KVPool
    memory: SharedMemory | CudaMemory
    """The pool's memory."""
    connector: KVConnectorWorker
    """The rank's connector, not started yet."""
    on_progress: OnProgress
    uses_graphs: bool
    num_threads: int
    """How many threads compute on a CPU; 0 on a GPU."""
    compiler: "Compiler | None" = None
    """The compiler of a GPU's kernels; None on a CPU."""
    drafter: Drafter | None = None
    """Guesses the next tokens, if speculation is configured."""
    takes_forced: bool = False
    """Whether tokens that a grammar forces are added without a step that samples them."""

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The scheduler's configuration, completed with the capacity of this rank."""
        return self.capacity.scheduler_config

    @property
    def num_blocks(self) -> int:
        """The number of blocks of this rank's pool, without those that only drafts use."""
        assert self.scheduler_config.num_blocks is not None
        return self.scheduler_config.num_blocks

    def make_pipeline(self, grammars: GrammarCompiler | None = None) -> Pipeline:
        """Makes the rank's pipeline. The collectives must be connected, and all ranks call this at the same time.

        `grammars`: only for rank 0, which samples.
        """
        device, is_async = self.model.device, self.scheduler_config.async_scheduling
        runner = self._make_cpu_runner(grammars) if device.type == "cpu" else self._make_gpu_runner(grammars)
        if self.model.collectives.size > 1:
            # A failure ends all ranks, and waiting for the device could mean waiting for another rank.
            runner = FailStop(runner)
        elif device.type == "cuda":
            runner = FailSettled(runner, lambda: torch.cuda.synchronize(device))
        if device.type == "cpu":
            return make_pipeline(runner, async_scheduling=is_async)
        return StreamPipeline(runner, is_async=is_async)

    def free(self) -> None:
        """Frees the pool's memory. No step and no connector may use this memory any more."""
        if isinstance(self.memory, CudaMemory):
            self.memory.free()

    def _make_cpu_runner(self, grammars: GrammarCompiler | None) -> StepLauncher:
        host_blocks = HostBlocks(self.scheduler_config.num_swap_blocks or 0, self.pool)
        return make_runner(
            self.model, self.pool, host_blocks, grammars, self.drafter, takes_forced=self.takes_forced
        )

    def _make_gpu_runner(self, grammars: GrammarCompiler | None) -> StepLauncher:
        # Without a GPU, Triton may be missing.
        from engine.gpu.attention_check import check_attention
        from engine.gpu.device_parts import make_device_parts
        from engine.gpu.graphs import CudaGraphs

        assert self.compiler is not None
        parts = make_device_parts(self.model, self.pool, self.capacity.limits)
        with _naming_assembler(self.compiler, self.model.device):
            parts.rehearse()
            check_attention(self.model, parts, self.pool, self.compiler)
        if self.uses_graphs:
            parts.record(
                CudaGraphs(), lambda done, count: self.on_progress("recording CUDA graphs", done, count)
            )
        return parts.runner(
            self.pool,
            self.scheduler_config.num_swap_blocks or 0,
            grammars,
            self.drafter,
            samples=self.model.collectives.rank == 0,
        )


def build_device_engine(
    config: BatonConfig,
    kv_keys: PlaneKeys | None,
    model_path: Path,
    incarnation: str,
    collectives: Collectives,
    clock: Clock,
    on_kv_output: Callable[[], None],
    on_progress: OnProgress,
) -> DeviceEngine:
    """Loads the rank's part of the model and binds its KV plane; the collectives need not be connected yet.

    `on_kv_output` runs on any thread, when the started connector has outputs. ConfigError or ModelError if this rank
    cannot serve the model.
    """
    engine, speculation = config.engine, config.speculation
    keep_freed_memory()
    torch.set_num_threads(engine.num_threads or max(1, find_machine().num_cores // collectives.size))
    device = rank_device(engine, collectives.rank)
    _check_supported(config, model_path, device)  # before kernels are compiled ahead
    compiler = _begin_on_gpu(device) if device.type == "cuda" else None
    wait = make_memory_wait(device, clock)
    with _compiling_ahead(config, model_path, device, collectives):
        model = wait.until_it_fits(
            lambda: load_model(
                config.model,
                model_path,
                device,
                kv_cache_dtype=engine.kv_cache_dtype,
                collectives=collectives,
                expert_parallel=engine.enable_expert_parallel,
                on_progress=returning_freed_memory(partial(on_progress, "loading weights")),
                max_model_len=config.scheduler.max_model_len,
            )
        )
    draft = load_draft(
        config, model_path, model, returning_freed_memory(partial(on_progress, "loading the draft model"))
    )
    return_freed_memory()
    # To measure the memory of a step, all kernels are launched for the first time here.
    with _naming_assembler(compiler, device):
        capacity = wait.until_it_fits(
            lambda: rank_capacity(engine, config.scheduler, model, speculation.num_drafts, draft)
        )
    pool, memory = _make_pool(model, capacity.scheduler_config, draft, wait)
    network = config.network
    connector = KVConnectorWorker(
        config.kv_transfer,
        network.bind_host,
        kv_keys,
        incarnation,
        clock,
        pool.block_bytes(),
        pool.fingerprint(model.digest, collectives.size, model.layer_groups.groups),
        on_kv_output,
        rank=collectives.rank,
        memory=memory if isinstance(memory, SharedMemory) else None,
        advertise_host=network.advertise_host,
    )
    return DeviceEngine(
        model=model,
        capacity=capacity,
        pool=pool,
        memory=memory,
        connector=connector,
        on_progress=on_progress,
        uses_graphs=engine.cuda_graphs,
        num_threads=torch.get_num_threads() if device.type == "cpu" else 0,
        compiler=compiler,
        drafter=make_drafter(speculation, capacity.scheduler_config, model, pool, draft),
        takes_forced=device.type == "cpu" and speculation.forced_tokens is not False,
    )


def _check_supported(config: BatonConfig, model_path: Path, device: torch.device) -> None:
    """ConfigError or ModelError if this device cannot compute the model as configured."""
    kv_cache_dtype = config.engine.kv_cache_dtype
    check_quantization(config.model, device.type)
    check_device(read_architecture(model_path), device.type)
    kv_dtype_of(config.model, kv_cache_dtype, device)
    check_fp8(config.model, kv_cache_dtype, device)


def _naming_assembler(compiler: "Compiler | None", device: torch.device) -> AbstractContextManager[None]:
    """`naming_assembler` of engine/gpu/compiler.py; on a CPU, a context without effect."""
    if compiler is None:
        return nullcontext()
    from engine.gpu.compiler import naming_assembler  # without a GPU, Triton may be missing

    return naming_assembler(compiler, device)


def _begin_on_gpu(device: torch.device) -> "Compiler":
    """Selects the GPU for this process; returns its compiler, with assembler and cache.

    Reads the kernels' switches from the environment. ConfigError if the environment names an unknown switch, or an
    assembler that does not work.
    """
    from engine.gpu.compiler import find_compiler  # without a GPU, Triton may be missing

    set_kernel_switches(KernelSwitches.parse(os.environ.get(SWITCHES_VARIABLE, "")))
    torch.cuda.set_device(device)
    torch.cuda.synchronize()  # creates the CUDA context, which must not count as memory of activations
    compiler = find_compiler(torch.cuda.get_device_capability(device))
    logger.info(
        "kernels are assembled by ptxas %s (%s) and kept in %s",
        compiler.version,
        compiler.ptxas,
        compiler.cache_dir,
    )
    if compiler.is_suspect:
        logger.warning(
            "ptxas %s may compile prefill's attention wrongly for this GPU; set TRITON_PTXAS_PATH to a ptxas of CUDA "
            "13.3 or later. Attention is compared with torch before this worker serves",
            compiler.version,
        )
    return compiler


def _compiling_ahead(
    config: BatonConfig, model_path: Path, device: torch.device, collectives: Collectives
) -> AbstractContextManager[object]:
    """A context during which threads compile a GPU's kernels; when it ends, all kernels are compiled."""
    if device.type == "cpu":
        return nullcontext()
    # Without a GPU, Triton may be missing.
    from engine.gpu.compile_ahead import CompileAhead, load_on, rehearse_outline
    from engine.layers.triton_backend import TritonBackend

    engine, scheduler = config.engine, config.scheduler

    def rehearse() -> None:
        torch.cuda.set_device(device)  # the setting is per thread
        outline = outline_model(
            config.model,
            model_path,
            TritonBackend(),
            kv_cache_dtype=engine.kv_cache_dtype,
            collectives=SilentRank(collectives.rank, collectives.size),
            expert_parallel=engine.enable_expert_parallel,
        )
        rehearse_outline(
            outline,
            with_defaults_of(device, scheduler, scheduler.max_model_len or outline.max_model_len).block_size,
            largest_steps(scheduler, outline, config.speculation.num_drafts),
            torch.cuda.get_device_properties(device).multi_processor_count,
            uses_graphs=engine.cuda_graphs,
        )

    num_threads = max(1, min(MAX_COMPILERS, (os.cpu_count() or 1) // collectives.size))
    return CompileAhead(rehearse, load_on(device), num_threads)


def _make_pool(
    model: LoadedModel, config: SchedulerConfig, draft: Draft | None, wait: MemoryWait
) -> tuple[KVPool, SharedMemory | CudaMemory]:
    """The pool with its memory, after a check that a draft model's pool and swapped blocks will fit beside it."""
    shape, num_blocks, more_bytes = model.kv_block_shape(config.block_size), config.num_blocks, 0
    assert num_blocks is not None
    if draft is not None:
        num_blocks += draft.num_spare_blocks(config)
        more_bytes = num_blocks * draft.block_bytes(config.block_size)
    if model.device.type == "cpu":  # host blocks of a GPU are pinned, which fails at once if they do not fit
        more_bytes += (config.num_swap_blocks or 0) * shape.size_bytes
    num_bytes = num_blocks * shape.size_bytes
    memory = wait.until_it_fits(lambda: _allocate_memory(num_bytes, model.device, more_bytes))
    array = memory.array if isinstance(memory, SharedMemory) else memory
    return KVPool(num_blocks, shape, model.device, array), memory


def _allocate_memory(num_bytes: int, device: torch.device, more_bytes: int) -> SharedMemory | CudaMemory:
    """Allocates the pool's memory, after a check that enough memory is available.

    Without the check, Linux might kill a process later. `more_bytes`: the bytes of a draft model's pool, and on a CPU
    of swapped blocks. ConfigError if memory does not suffice; on a GPU its subclass OutOfGpuMemory.
    """
    is_on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if is_on_gpu else available_memory()
    why = f"and {free / 2**20:,.0f} MiB are free"
    try:
        if num_bytes + more_bytes <= free:
            return CudaMemory(num_bytes, device.index) if is_on_gpu else SharedMemory(num_bytes)
    except CudaOutOfMemory:
        why = f"but the GPU could not allocate them, although {free / 2**20:,.0f} MiB were free"
    except OSError as error:
        why = f"but the system refuses them ({error.strerror}; see `ulimit -a`)"
    swapped = ", and with `preemption: swap` engine.swap_space_mib or scheduler.num_swap_blocks"
    raise (OutOfGpuMemory if is_on_gpu else ConfigError)(
        f"the KV pool needs {(num_bytes + more_bytes) / 2**20:,.0f} MiB, {why}; reduce engine.kv_cache_memory_mib or "
        f"scheduler.num_blocks{'' if is_on_gpu else swapped}"
    )
