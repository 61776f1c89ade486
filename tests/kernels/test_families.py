"""Every family gives the same tokens with the GPU's kernels as on a CPU.

Without a GPU, the kernels are interpreted. So CI tests only the families that need something special of a
kernel. By hand, all families can be tested.
"""

from pathlib import Path

import pytest
import torch

from engine.families import Family
from tests.factories.families import CASES
from tests.factories.models import make_model_dir
from tests.kernels.device_parts import OF_PADDED_ROWS, SMALL
from tests.kernels.test_device_engine import assert_same, make_config, on_cpu, on_device

pytestmark = OF_PADDED_ROWS

IN_CI = ("olmo2", "gemma3, scaled, capped", "gpt oss", "deepseek v3")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.by_hand]) for name in CASES],
)
def test_the_same_tokens_as_on_a_cpu(tmp_path: Path, device: torch.device, name: str) -> None:
    case = CASES[name]
    overrides = dict(case.overrides)
    has_equal_layers = case.family in (Family.PHI3, Family.OLMO2, Family.GRANITE, Family.GLM4)
    num_layers = 1 if has_equal_layers or case.family.has_shared_experts else 2
    for key in ("layer_types", "no_rope_layers"):
        if key in overrides:
            overrides[key] = overrides[key][-num_layers:]
    if case.family.has_shared_experts:
        overrides |= {"first_k_dense_replace": 0}
    if case.family is Family.GLM4_MOE_LITE:
        overrides |= {"mlp_layer_types": ["sparse"]}
    if case.family.has_latent:
        overrides |= {"num_key_value_heads": SMALL["num_attention_heads"]}
    shape = SMALL | {"num_hidden_layers": num_layers}
    path = make_model_dir(tmp_path / "model", case.architecture, **(shape | overrides))
    config = make_config(16, 16)
    assert_same(on_device(path, device, config, uses_graphs=False), on_cpu(path, config))
