"""The launches of a decode step, kernel by kernel, with all fusions, with none, and without each."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import StepLimits
from engine.gpu.graphs import Repeater
from engine.kernels.embedding import _embed_kernel
from engine.kernels.switches import ALL_OFF, KernelSwitches, switched
from tests.kernels.device_parts import make_parts

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


def launches(folder: Path, switches: KernelSwitches, num_tokens: int, device: torch.device) -> Counter[str]:
    """The launches of a recorded step of `num_tokens` decodes."""
    limits = StepLimits(16, 16, 64)
    with switched(switches):
        _, parts, _ = make_parts(folder, device, limits, dtype="float16", num_hidden_layers=NUM_LAYERS)
        with counting_launches() as counts:
            parts.forward.record([num_tokens], Repeater(), has_chunks=False)
    return counts


def in_layers(**counts: int) -> Counter[str]:
    """The launches of all layers, given the launches of one layer."""
    return Counter({name: NUM_LAYERS * count for name, count in counts.items()})


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
class TestLaunches:
    """docs/kernels.md, "Launches of a decode step"."""

    def test_of_up_to_4_tokens(self, tmp_path: Path, device: torch.device) -> None:
        expected = in_layers(skinny_linear_fma=4, rope_store=1, paged_attention=1)
        expected += Counter(embed=1, skinny_linear_fma=1)
        assert launches(tmp_path, KernelSwitches(), 1, device) == expected

    def test_of_up_to_16_tokens(self, tmp_path: Path, device: torch.device) -> None:
        expected = in_layers(rms_norm=2, skinny_linear_dot=4, rope_store=1, paged_attention=1)
        expected += Counter(embed=1, rms_norm=1, skinny_linear_dot=1)
        assert launches(tmp_path, KernelSwitches(), 8, device) == expected

    def test_with_nothing_fused(self, tmp_path: Path, device: torch.device) -> None:
        expected = in_layers(
            rms_norm=2, skinny_linear_fma=4, rope_store=1, paged_attention=1, merge_partials=1, gate_mul=1
        )
        expected += Counter(embed=1, rms_norm=1, skinny_linear_fma=1)
        assert launches(tmp_path, ALL_OFF, 1, device) == expected

    @pytest.mark.parametrize(
        ("switch", "more"),
        [
            ("fused_merge", {"merge_partials": NUM_LAYERS}),
            ("fused_silu", {"gate_mul": NUM_LAYERS}),
            ("fused_residual", {"rms_norm": 2 * NUM_LAYERS - 1}),
            ("fused_norm", {"rms_norm": 2 * NUM_LAYERS + 1}),
            ("pdl", {}),
        ],
    )
    def test_without_one_of_them(
        self, switch: str, more: dict[str, int], tmp_path: Path, device: torch.device
    ) -> None:
        """The last sum is not normed in the launch that adds: its norm belongs to the logits."""
        with_all = launches(tmp_path, KernelSwitches(), 1, device)
        without = launches(tmp_path, KernelSwitches(**{switch: False}), 1, device)
        assert without - with_all == Counter(more)
        assert with_all - without == Counter()
