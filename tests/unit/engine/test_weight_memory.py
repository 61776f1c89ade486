"""Memory of packed weights: aligned, apart, in huge pages, and freed with its weights."""

import mmap
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch

from engine.layers import weight_memory as module
from engine.layers.weight_memory import CHUNK_BYTES, weight_memory


@pytest.fixture(autouse=True)
def no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_chunk", torch.empty(0, dtype=torch.uint8))


def test_weights_are_aligned_and_apart() -> None:
    sizes = [1, 64, 65, CHUNK_BYTES // 2, CHUNK_BYTES // 2, CHUNK_BYTES + 1, 0, 100]
    tensors = [weight_memory(size) for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert (tensor.dtype, tensor.shape) == (torch.uint8, (size,))
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number).all())


def test_threads_get_memory_of_their_own() -> None:
    def addresses(_: int) -> list[int]:
        return [weight_memory(64).data_ptr() for _ in range(1_000)]

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = [address for each in threads.map(addresses, range(4)) for address in each]
    finally:
        sys.setswitchinterval(interval_s)
    assert len(set(found)) == len(found)


def test_memory_is_freed_with_the_last_weight_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    maps: list[weakref.ref[mmap.mmap]] = []

    class Noted(mmap.mmap):
        def madvise(self, *_: int) -> None:
            maps.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Noted)
    first, second = weight_memory(CHUNK_BYTES - 64), weight_memory(64)
    larger = weight_memory(2 * CHUNK_BYTES)
    assert len(maps) == 2
    del first
    assert maps[0]() is not None
    del second
    assert maps[0]() is None
    del larger
    weight_memory(CHUNK_BYTES)
    assert maps[1]() is None


def test_a_linux_without_huge_pages_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Mock(side_effect=OSError(22, "Invalid argument"))
    monkeypatch.setattr(mmap, "mmap", type("Refusing", (mmap.mmap,), {"madvise": refused}))
    assert len(weight_memory(100)) == 100
    assert refused.call_args.args == (mmap.MADV_HUGEPAGE,)
