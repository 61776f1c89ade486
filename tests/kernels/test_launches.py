"""What a step of decodes launches, kernel by kernel, with all that can be fused and with nothing of it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import ModelConfig
from engine.batch import StepLimits
from engine.gpu.device_parts import make_device_parts
from engine.gpu.graphs import Repeats
from engine.kernels.embedding import _embed_kernel
from engine.kernels.switches import ALL_OFF, KernelSwitches, switched
from engine.kv_cache import KVPool
from engine.layers.triton_backend import TritonBackend
from engine.loading.loader import load_model
from tests.factories.models import make_model_dir
from tests.kernels.test_device_engine import SMALL

NUM_LAYERS = 2


@contextmanager
def counting_launches() -> Iterator[Counter[str]]:
    """By the kernel's name."""
    counts: Counter[str] = Counter()
    kind: Any = type(_embed_kernel)
    run = kind.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self.fn.__name__.strip("_").removesuffix("_kernel")] += 1
        return run(self, *args, **kwargs)

    kind.run = counted
    try:
        yield counts
    finally:
        kind.run = run


def launches(path: Path, switches: KernelSwitches, num_tokens: int, device: torch.device) -> Counter[str]:
    """Of a recorded step of so many decodes."""
    with switched(switches):
        model = load_model(ModelConfig(dtype="float16"), path, device, TritonBackend())
        pool = KVPool(4, model.kv_block_shape(16), device)
        parts = make_device_parts(model, pool, StepLimits(16, 16, 64), num_multiprocessors=2)
        with counting_launches() as counts:
            parts.forward.record([num_tokens], Repeats(), has_chunks=False)
    return counts


def in_layers(**counts: int) -> Counter[str]:
    """Of all layers, from those of one."""
    return Counter({name: NUM_LAYERS * count for name, count in counts.items()})


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
class TestLaunches:
    """docs/kernels.md, "Launches of a decode step"."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return make_model_dir(tmp_path / "model", **{**SMALL, "num_hidden_layers": NUM_LAYERS})

    def test_of_up_to_4_tokens(self, path: Path, device: torch.device) -> None:
        expected = in_layers(skinny_linear_fma=4, rope_store=1, paged_attention=1)
        expected += Counter(embed=1, skinny_linear_fma=1)
        assert launches(path, KernelSwitches(), 1, device) == expected

    def test_of_up_to_16_tokens(self, path: Path, device: torch.device) -> None:
        expected = in_layers(rms_norm=2, skinny_linear_dot=4, rope_store=1, paged_attention=1)
        expected += Counter(embed=1, rms_norm=1, skinny_linear_dot=1)
        assert launches(path, KernelSwitches(), 8, device) == expected

    def test_with_nothing_fused(self, path: Path, device: torch.device) -> None:
        expected = in_layers(
            rms_norm=2, skinny_linear_fma=4, rope_store=1, paged_attention=1, merge_partials=1, silu_mul=1
        )
        expected += Counter(embed=1, rms_norm=1, skinny_linear_fma=1)
        assert launches(path, ALL_OFF, 1, device) == expected

    @pytest.mark.parametrize(
        ("switch", "more"),
        [
            ("fused_merge", {"merge_partials": NUM_LAYERS}),
            ("fused_silu", {"silu_mul": NUM_LAYERS}),
            ("fused_residual", {"rms_norm": 2 * NUM_LAYERS - 1}),
            ("fused_norm", {"rms_norm": 2 * NUM_LAYERS + 1}),
            ("pdl", {}),
        ],
    )
    def test_without_one_of_them(
        self, switch: str, more: dict[str, int], path: Path, device: torch.device
    ) -> None:
        """The last sum of all is not normed where it is made: the norm belongs to the logits."""
        with_all = launches(path, KernelSwitches(), 1, device)
        without = launches(path, KernelSwitches(**{switch: False}), 1, device)
        assert without - with_all == Counter(more)
        assert with_all - without == Counter()
