"""A rank's capacity: completes the scheduler's configuration by what the model and the device allow."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from baton.config import EngineConfig, SchedulerConfig
from baton.errors import ConfigError
from engine.batch import StepLimits
from engine.draft_parts import Draft
from engine.loading.footprint import CPU_KV_CACHE_MIB, GPU_BLOCK_SIZE
from engine.loading.loader import LoadedModel

if TYPE_CHECKING:
    from engine.gpu.measure import Measured
    from engine.gpu.memory import DeviceMemory

logger = logging.getLogger(__name__)

WHOLE_PROMPTS_BUDGET = 512
"""Tokens of the largest step on a CPU if prompts are not split. If the longest request has more tokens, a step may
have as many as this request."""
GPU_DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "block_size": GPU_BLOCK_SIZE}
"""Values that replace the defaults on a GPU, since the defaults are for a CPU, and too small to keep a GPU busy."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one rank can serve."""

    scheduler_config: SchedulerConfig
    """The completed configuration. A worker's scheduler uses the configuration of rank 0, but with the smallest
    `num_blocks` of all ranks."""
    limits: StepLimits
    """The sizes for which the rank makes buffers; the scheduler may use less."""


def rank_capacity(
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    model: LoadedModel,
    num_drafts: int = 0,
    draft: Draft | None = None,
) -> Capacity:
    """Computes a rank's capacity. ConfigError names the key that asks for more than there is.

    With its subclass OutOfGpuMemory, the lack of memory may be temporary. On a GPU, the largest step is run to
    measure its memory, unless the configuration sets all values that depend on the measurement. `num_drafts`: the
    most drafts of a request in a step. `draft`: the model that guesses the drafts; its KV uses a part of the memory.
    """
    max_model_len = _max_model_len(scheduler, model)
    requested = with_defaults_of(model.device, scheduler, max_model_len)
    has_budget = "max_num_batched_tokens" in scheduler.model_fields_set
    num_swap_blocks = _num_swap_blocks(engine.swap_space_mib, requested, model)
    config = requested.with_values("scheduler", max_model_len=max_model_len, num_swap_blocks=num_swap_blocks)
    if model.device.type == "cuda":
        wants_chunk = not has_budget and requested.splits_prompts
        limits = _limits(requested, max_model_len, num_drafts)
        config = _with_measured(engine, config, model, limits, wants_chunk=wants_chunk)
    if config.num_blocks is None:
        default_mib = CPU_KV_CACHE_MIB * (2 if model.kv_dtype == torch.float32 else 1)
        memory_mib = engine.kv_cache_memory_mib or default_mib
        config = config.with_values("scheduler", num_blocks=_num_blocks(memory_mib, requested, model, draft))
    if model.device.type == "cpu" and requested.batching == "mixed" and not has_budget:
        assert config.num_blocks is not None
        budget = (config.num_blocks - 1) * config.block_size  # only the pool's size limits a step
        config = config.with_values("scheduler", max_num_batched_tokens=budget)
    largest = max(requested, config, key=lambda each: each.max_num_batched_tokens)
    return Capacity(config, _limits(largest, max_model_len, num_drafts))


def largest_steps(scheduler: SchedulerConfig, model: LoadedModel, num_drafts: int = 0) -> StepLimits:
    """The largest steps that configuration and model allow; a worker rehearses them when it starts."""
    max_model_len = _max_model_len(scheduler, model)
    requested = with_defaults_of(model.device, scheduler, max_model_len)
    return _limits(requested, max_model_len, num_drafts)


def with_defaults_of(device: torch.device, requested: SchedulerConfig, max_model_len: int) -> SchedulerConfig:
    """Replaces unset keys by the defaults of this kind of device. `max_model_len`: tokens of the longest request."""
    if device.type == "cpu":
        return requested.with_values("scheduler", **_cpu_budget(requested, max_model_len))
    defaults = dict(GPU_DEFAULTS)
    if not requested.splits_prompts:
        defaults["max_num_batched_tokens"] = max(defaults["max_num_batched_tokens"], max_model_len)
    unset = {key: value for key, value in defaults.items() if key not in requested.model_fields_set}
    return requested.with_values("scheduler", **unset)


def _cpu_budget(requested: SchedulerConfig, max_model_len: int) -> dict[str, object]:
    """A larger `max_num_batched_tokens`, if the key is unset, and its default is too small for decodes or for whole
    prompts."""
    if "max_num_batched_tokens" in requested.model_fields_set:
        return {}
    least = max(requested.max_num_batched_tokens, requested.max_num_seqs)
    if not requested.splits_prompts:
        least = max(least, WHOLE_PROMPTS_BUDGET, max_model_len)
    return {"max_num_batched_tokens": least} if least > requested.max_num_batched_tokens else {}


def _limits(config: SchedulerConfig, max_model_len: int, num_drafts: int) -> StepLimits:
    """The largest sizes. A request may have one sequence in a step for its last token, and one for each of its
    drafts."""
    max_num_seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
    num_sequences = min(max_num_seqs * (1 + num_drafts), budget)
    return StepLimits(max(num_sequences, max_num_seqs), budget, max_model_len)


def _with_measured(
    engine: EngineConfig,
    config: SchedulerConfig,
    model: LoadedModel,
    limits: StepLimits,
    *,
    wants_chunk: bool,
) -> SchedulerConfig:
    """Adds the number of blocks that fit the GPU, unless it is set. With `wants_chunk`, also adds the best step
    size."""
    wants_memory = config.num_blocks is None and engine.kv_cache_memory_mib is None
    if not wants_chunk and not wants_memory:
        return config
    measured = _measure(engine, config.block_size, model, limits, wants_chunk=wants_chunk)
    if measured.chunk is not None:
        # A step of `max_num_seqs` decodes must still fit.
        chosen = min(max(measured.chunk, config.max_num_seqs), config.max_num_batched_tokens)
        logger.info(
            "chose scheduler.max_num_batched_tokens %d by measuring; set this key to use the same value at "
            "every start",
            chosen,
        )
        config = config.with_values("scheduler", max_num_batched_tokens=chosen)
    if wants_memory:
        logger.info("GPU memory: %s", measured.memory.arithmetic())
        config = config.with_values("scheduler", num_blocks=_num_gpu_blocks(measured.memory, config, model))
    return config


def _measure(
    engine: EngineConfig, block_size: int, model: LoadedModel, limits: StepLimits, *, wants_chunk: bool
) -> "Measured":
    from engine.gpu.measure import measure  # Triton is only installed where there is a GPU

    return measure(
        model,
        block_size,
        limits,
        engine.gpu_memory_utilization,
        uses_graphs=engine.cuda_graphs,
        wants_chunk=wants_chunk,
    )


def _max_model_len(requested: SchedulerConfig, model: LoadedModel) -> int:
    if requested.max_model_len is not None and requested.max_model_len > model.max_model_len:
        raise ConfigError(
            f"scheduler.max_model_len: got {requested.max_model_len}, but this model supports at most "
            f"{model.max_model_len}"
        )
    return requested.max_model_len or model.max_model_len


def _num_blocks(memory_mib: int, requested: SchedulerConfig, model: LoadedModel, draft: Draft | None) -> int:
    size_bytes, num_spare = model.kv_block_shape(requested.block_size).size_bytes, 0
    if draft is not None:
        size_bytes += draft.block_bytes(requested.block_size)
        num_spare = draft.num_spare_blocks(requested)
    num_blocks = memory_mib * 2**20 // size_bytes - num_spare
    if num_blocks < 2:
        beside = f" beside {num_spare} blocks for drafts" if num_spare else ""
        raise ConfigError(
            f"engine.kv_cache_memory_mib: got {memory_mib}, which is too little for two blocks of this model{beside}"
        )
    return num_blocks


def _num_gpu_blocks(memory: "DeviceMemory", requested: SchedulerConfig, model: LoadedModel) -> int:
    """The number of blocks that fit; OutOfGpuMemory if a request of `max_model_len` tokens does not fit."""
    max_model_len, groups = requested.max_model_len, model.layer_groups.groups
    assert max_model_len is not None
    needed = groups.num_blocks_for_one(max_model_len, requested.block_size, requested.max_num_batched_tokens)
    shape = model.kv_block_shape(requested.block_size)
    return min(memory.num_blocks(shape.size_bytes, needed, max_model_len), shape.max_blocks_on_gpu)


def _num_swap_blocks(memory_mib: int, requested: SchedulerConfig, model: LoadedModel) -> int | None:
    """Blocks of host memory for preempted requests; None if preempted requests are recomputed."""
    if requested.preemption == "recompute":
        return None
    size_bytes = model.kv_block_shape(requested.block_size).size_bytes
    num_blocks = requested.num_swap_blocks or memory_mib * 2**20 // size_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"engine.swap_space_mib: got {memory_mib}, which is too little for one block of this model"
        )
    return num_blocks
