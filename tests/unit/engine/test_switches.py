"""The switches of kernel optimizations."""

import pytest

from baton.errors import ConfigError
from engine.kernels.switches import ALL_OFF, KernelSwitches, kernel_switches, switched


def test_all_are_on_unless_some_are_left_out() -> None:
    for text, off in (("", ()), (" no-fused-merge ,", ("no-fused-merge",))):
        assert KernelSwitches.parse(text).off == off


def test_each_can_be_left_out_by_its_name() -> None:
    assert KernelSwitches.parse(",".join(ALL_OFF.off)) == ALL_OFF
    for name in ALL_OFF.off:
        assert KernelSwitches.parse(name).off == (name,)


@pytest.mark.parametrize("text", ["fused-merge", "no-such", "no_fused_merge", "no-fused-merge no-such"])
def test_an_unknown_name_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"BATON_KERNELS: got .*no-fused-merge"):
        KernelSwitches.parse(text)


def test_the_process_switches_return_after_a_comparison() -> None:
    before = kernel_switches()
    with switched(ALL_OFF, fused_merge=True) as within:
        assert kernel_switches() is within
        assert within.fused_merge
    assert kernel_switches() is before
