"""A GPU's engine without a GPU. From now on, workers in this process interpret their Triton kernels.

Import this before any kernel, and never in a process that compiles kernels. Graphs, compilers and memory of a
GPU are left out.
"""

import os
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared

import pytest
import torch

import engine.build
from baton.config import ModelConfig
from engine.build import DeviceEngine
from engine.gpu.device_parts import make_device_parts
from engine.grammars.compiler import GrammarCompiler
from engine.layers.triton_backend import TritonBackend
from engine.loading.loader import LoadedModel, load_model
from engine.pipeline import Pipeline, StreamPipeline
from tests.factories import fast_interpreter  # noqa: F401


def interpret_kernels(patch: pytest.MonkeyPatch | None = None) -> None:
    """Makes later engines compute with Triton's kernels, as long as `patch` lasts; None: for good."""
    patch = patch or pytest.MonkeyPatch()
    patch.setattr(engine.build, "load_model", _load_model)
    patch.setattr(DeviceEngine, "make_pipeline", _make_pipeline)


def _load_model(config: ModelConfig, path: Path, device: torch.device, **options: Any) -> LoadedModel:
    return load_model(config, path, device, TritonBackend(), **options)


def _make_pipeline(built: DeviceEngine, grammars: GrammarCompiler | None = None) -> Pipeline:
    """Makes the pipeline as for a GPU."""
    parts = make_device_parts(built.model, built.pool, built.capacity.limits, num_multiprocessors=2)
    num_swap_blocks = built.scheduler_config.num_swap_blocks or 0
    runner = parts.runner(built.pool, num_swap_blocks, grammars, built.drafter)
    return StreamPipeline(runner, is_async=built.scheduler_config.async_scheduling)
