"""The default size of a prefill worker's steps: larger where matrix units multiply faster than weights are read."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from baton.config import BatonConfig
from engine import prefill_steps
from engine.native.instructions import INSTRUCTION_SETS
from engine.prefill_steps import with_prefill_steps
from tests.factories.quantized_checkpoints import compressed_tensors

AMX, WITHOUT = INSTRUCTION_SETS[:2]
BFLOAT16 = {"model": {"dtype": "bfloat16"}}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with AMX and kernels, and a model's folder."""
    monkeypatch.setattr(prefill_steps, "machine_instructions", lambda: AMX)
    monkeypatch.setattr(prefill_steps, "native_library", Mock())
    (tmp_path / "config.json").write_text("{}")


def step_tokens(folder: Path, values: dict[str, Any]) -> int:
    return with_prefill_steps(BatonConfig.from_mapping(values), folder).scheduler.max_num_batched_tokens


def test_steps_are_larger_with_matrix_units(tmp_path: Path) -> None:
    assert step_tokens(tmp_path, BFLOAT16) == 512
    assert step_tokens(tmp_path, BFLOAT16 | {"scheduler": {"max_num_seqs": 600}}) == 600, (
        "all decodes must fit"
    )
    assert step_tokens(tmp_path, {"model": {"dtype": "bfloat16", "quantization": "none"}}) == 512


@pytest.mark.parametrize(
    "values",
    [
        BFLOAT16 | {"scheduler": {"max_num_batched_tokens": 128}},
        BFLOAT16 | {"scheduler": {"enable_chunked_prefill": False}},
        BFLOAT16 | {"scheduler": {"batching": "mixed"}},
        BFLOAT16 | {"engine": {"device": "cuda"}},
        {"model": {"dtype": "float32"}},
        {"model": {"dtype": "bfloat16", "quantization": "int8"}},
    ],
    ids=str,
)
def test_a_key_another_kind_of_step_or_of_weights_keeps_the_size(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    assert step_tokens(tmp_path, values) == 128


def test_without_matrix_units_or_kernels_the_size_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_steps, "native_library", lambda: None)
    assert step_tokens(tmp_path, BFLOAT16) == 128
    monkeypatch.undo()
    for instructions in (WITHOUT, None):
        monkeypatch.setattr(prefill_steps, "machine_instructions", lambda found=instructions: found)
        assert step_tokens(tmp_path, BFLOAT16) == 128


def test_checkpoints_with_fewer_bits_keep_the_size(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    assert step_tokens(tmp_path, BFLOAT16) == 128
    config.write_text(json.dumps({"compression_config": compressed_tensors("int-quantized")}))
    assert step_tokens(tmp_path, BFLOAT16) == 128, "the key of old checkpoints"
    config.write_text(json.dumps({"quantization_config": None}))
    assert step_tokens(tmp_path, BFLOAT16) == 512
    (tmp_path / "model.gguf").touch()
    assert step_tokens(tmp_path, BFLOAT16) == 128
    assert step_tokens(tmp_path, {"model": {"dtype": "bfloat16", "quantization": "none"}}) == 512
