"""Which launches may begin before the previous kernel has ended."""

import pytest
import triton

from engine.kernels.dependent_launch import launch_options
from engine.kernels.switches import switched
from tests.kernels.compile_only import compiling_for


def test_where_kernels_are_interpreted_there_is_nothing_to_wait_for() -> None:
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels run on a GPU here")
    assert launch_options() == {"PDL": False}


@pytest.mark.parametrize(("arch", "has_it"), [(80, False), (90, True), (100, True)])
def test_devices_from_hopper_on_launch_early_unless_switched_off(
    arch: int, has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with compiling_for(arch), switched(pdl=True):
        assert launch_options() == ({"PDL": True, "launch_pdl": True} if has_it else {"PDL": False})
        with switched(pdl=False):
            assert launch_options() == {"PDL": False}
