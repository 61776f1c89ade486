"""Engines for checks, with the real model, pool and runner. Checks can read logits and replay steps."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from baton.config import ModelConfig
from benchmarks.gpu.setting import Setting
from engine.batch import StepBatch, StepLimits
from engine.device import mark
from engine.forward import Forward, TorchForward
from engine.gpu.device_parts import DeviceParts, make_device_parts
from engine.gpu.graphs import Recorder, Replay
from engine.kernels.skinny_linear import MAX_TOKENS
from engine.kv_cache import HostBlocks, KVPool
from engine.layers.paged_attention import PagedAttention
from engine.layers.torch_backend import TorchBackend
from engine.layers.triton_backend import TritonBackend
from engine.loading.loader import DTYPES, LoadedModel, load_model
from engine.runner import ModelRunner
from engine.runner_parts import GroupedAttention
from engine.sampler import TorchSampler
from engine.step_logits import StepLogits

Dtype = Literal["float32", "bfloat16", "float16"]


class NotingForward:
    """A forward pass that keeps the logits of the last step."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.logits_RV: torch.Tensor | None = None

    def __call__(self, batch: StepBatch) -> StepLogits:
        output = self._forward(batch)
        self.logits_RV = output.sampling_RV
        return output


class NotingRecorder:
    """A recorder that keeps the last replay. Calling the replay again computes the same step once more."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.last: Replay | None = None

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        given, replay = self._recorder.record(work)

        def noted() -> None:
            self.last = replay
            replay()

        return given, noted


@dataclass(frozen=True, slots=True)
class CheckedEngine:
    """A runner, its model, pool and forward pass."""

    model: LoadedModel
    pool: KVPool
    runner: ModelRunner
    forward: NotingForward


def load(
    setting: Setting,
    path: Path,
    dtype: Dtype,
    *,
    dummy: bool,
    torch_only: bool = False,
    quantization: Literal["auto", "fp8"] = "auto",
) -> LoadedModel:
    """Loads a model on the device, for our kernels or, with `torch_only`, for torch's kernels."""
    load_format: Literal["auto", "dummy"] = "dummy" if dummy else "auto"
    config = ModelConfig(dtype=dtype, load_format=load_format, quantization=quantization)
    return load_model(config, path, setting.device, TorchBackend() if torch_only else TritonBackend())


def device_parts(
    setting: Setting,
    model: LoadedModel,
    pool: KVPool,
    limits: StepLimits,
    recorder: Recorder | None = None,
    sizes: Sequence[int] = (),
    prompt_sizes: Sequence[int] = (),
) -> DeviceParts:
    """Makes the parts of a GPU worker. Times the products of decode steps with `sizes` requests, then records these
    steps.

    Of the steps with `prompt_sizes` tokens, it records those that a worker would record.
    """
    parts = make_device_parts(model, pool, limits, setting.num_multiprocessors)
    if recorder is not None:
        for size in sizes:
            if size <= MAX_TOKENS:
                parts.forward.rehearse(size, 1)
        parts.choose_products()
        recorded = [size for size in prompt_sizes if size in parts.mixed_sizes]
        parts.forward.record(recorded, recorder, has_chunks=True)
        parts.forward.record(sizes, recorder, has_chunks=False)
    return parts


def device_engine(
    setting: Setting,
    model: LoadedModel,
    num_blocks: int,
    block_size: int,
    limits: StepLimits,
    recorder: Recorder | None = None,
    sizes: Sequence[int] = (),
    prompt_sizes: Sequence[int] = (),
) -> CheckedEngine:
    """An engine over these parts, with its own pool. It keeps its logits."""
    pool = KVPool(num_blocks, model.kv_block_shape(block_size), setting.device)
    return engine_over(setting, model, pool, limits, recorder, sizes, prompt_sizes)


def engine_over(
    setting: Setting,
    model: LoadedModel,
    pool: KVPool,
    limits: StepLimits,
    recorder: Recorder | None = None,
    sizes: Sequence[int] = (),
    prompt_sizes: Sequence[int] = (),
) -> CheckedEngine:
    """An engine like that of `device_engine`, over a given pool. Several engines may use the pool in turn."""
    parts = device_parts(setting, model, pool, limits, recorder, sizes, prompt_sizes)
    forward = NotingForward(parts.forward)
    runner = ModelRunner(
        forward,
        parts.sampler,
        HostBlocks(0, pool),
        pool.shape.block_size,
        kv_groups=parts.forward.groups,
        mark=lambda: mark(setting.device),
    )
    return CheckedEngine(model, pool, runner, forward)


def torch_engine(model: LoadedModel, num_blocks: int, block_size: int) -> CheckedEngine:
    """The parts of a CPU worker on the model's device: the reference for tokens and logits."""
    pool = KVPool(num_blocks, model.kv_block_shape(block_size), model.device)
    groups = model.layer_groups
    of_groups = [
        PagedAttention(pool, model.architecture.of_layers(layers), model.num_heads, model.dtype, group)
        for group, layers in enumerate(groups.layers)
    ]
    attention = GroupedAttention(of_groups, groups.places)
    forward = NotingForward(TorchForward(model.decoder, attention, model.device))
    runner = ModelRunner(forward, TorchSampler(), HostBlocks(0, pool), block_size, kv_groups=groups.groups)
    return CheckedEngine(model, pool, runner, forward)


def fill_randomly(pool: KVPool) -> None:
    """Fills the pool with random keys and values, block by block, so that this needs little extra memory."""
    generator = torch.Generator(pool.blocks_NLKHTD.device).manual_seed(0)
    for block in pool.blocks_NLKHTD[1:]:
        block.normal_(generator=generator)


def fill_alike(pool: KVPool) -> None:
    """Fills every block alike, so that tokens do not depend on which blocks a request has."""
    generator = torch.Generator(pool.blocks_NLKHTD.device).manual_seed(0)
    pool.blocks_NLKHTD[1].normal_(generator=generator)
    for block in pool.blocks_NLKHTD[2:]:
        block.copy_(pool.blocks_NLKHTD[1])


def free_bytes(setting: Setting) -> int:
    """Free bytes of the device. In dry runs, the bytes that a test may use."""
    if setting.is_dry:
        return 2**20
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def itemsize(dtype: Dtype) -> int:
    return DTYPES[dtype].itemsize
