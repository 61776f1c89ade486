"""Which GPU computes with tensors of a device."""

import pytest
import torch

from engine.device import gpu_of

CPU, META, SECOND = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 1)


def test_a_cpu_has_none_and_a_gpu_is_its_own() -> None:
    assert gpu_of(CPU) is None
    assert gpu_of(SECOND) == SECOND


@pytest.mark.parametrize(("has_gpus", "expected"), [(False, None), (True, SECOND)])
def test_tensors_without_memory_belong_to_the_gpu_that_the_thread_computes_on(
    monkeypatch: pytest.MonkeyPatch, has_gpus: bool, expected: torch.device | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert gpu_of(META) == expected
