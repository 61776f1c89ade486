"""Baton ignores no field of a family's config in transformers that changes logits: it reads or refuses the field.

A new version of transformers may have new fields; this test names those that Baton does not know yet. With a new
version, run it for all families (`make test-all`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from baton.errors import ModelError
from engine.families import Family
from engine.model_config import ModelArchitecture, read_architecture
from tests.factories.families import CASES
from tests.factories.models import make_model_dir

pytestmark = pytest.mark.slow

WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
OVERRIDES: dict[Family, dict[str, Any]] = {
    Family.LLAMA: {},
    Family.MISTRAL: {"sliding_window": 7},
    Family.QWEN2: WINDOWS,
    Family.QWEN3: WINDOWS | {"head_dim": 16},
}
"""Families whose models are not in `CASES`."""
NEAR_OTHERS = (
    Family.MISTRAL,
    Family.QWEN2,
    Family.MIXTRAL,
    Family.GRANITE,
    Family.OLMO2,
    Family.GLM4,
    Family.GLM4_MOE_LITE,
    Family.GEMMA2,
    Family.DEEPSEEK_V2,
)
"""Families whose fields other families have, too. `make test-all` has all."""
NAMES = {"architectures", "model_type", "dtype", "transformers_version"}
GENERIC = {"is_causal": True}
"""Fields that no config class declares, but transformers' code reads."""
PROMPT = [(37 * i + 11) % 290 + 3 for i in range(24)]


def changed(value: object) -> list[object]:
    """Other values for the field that has this value."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, value // 2]
    if isinstance(value, float):
        return [1.7 * value + 0.01]
    if isinstance(value, list):
        return [value[::-1], value[:1] * len(value)]
    return [True, 2, 0.5] if value is None else []


def logits(path: Path) -> torch.Tensor | None:
    """The logits that transformers computes; None if it refuses the folder."""
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.inference_mode():
            found: torch.Tensor = model(torch.tensor([PROMPT])).logits
    except Exception:  # a folder that transformers cannot load proves nothing
        return None
    return found


def architecture(path: Path) -> ModelArchitecture | None:
    """The architecture that Baton reads; None if it refuses the folder."""
    try:
        return read_architecture(path)
    except ModelError:
        return None


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[pytest.mark.by_hand] if family in NEAR_OTHERS else []) for family in Family],
)
def test_a_field_that_changes_logits_is_read_or_refused(tmp_path: Path, family: Family) -> None:
    cases = [case.overrides for case in CASES.values() if case.family is family]
    path = make_model_dir(tmp_path, family.value, **(cases[0] if cases else OVERRIDES[family]))
    fields: dict[str, Any] = GENERIC | json.loads(
        AutoConfig.from_pretrained(path).to_json_string(use_diff=False)
    )
    (path / "config.json").write_text(json.dumps(fields))
    own, expected = architecture(path), logits(path)
    assert own is not None
    assert expected is not None
    ignored, num_compared = [], 0
    for key in fields.keys() - NAMES:
        for value in changed(fields[key]):
            (path / "config.json").write_text(json.dumps(fields | {key: value}))
            if architecture(path) != own:
                continue
            found = logits(path)
            num_compared += found is not None
            if found is not None and not torch.allclose(found, expected, rtol=0, atol=1e-4):
                ignored.append(f"{key}: {value!r}")
    assert not ignored
    assert num_compared >= len(fields) / 4, "most values were refused, so this test proves little"
