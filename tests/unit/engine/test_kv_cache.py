"""The pool's memory: what is where, and that a block is one span."""

import numpy as np
import pytest
import torch

from baton.errors import ConfigError
from engine import kv_cache
from engine.kv_cache import HostBlocks, KVBlockShape, KVPool, host_memory
from kv_transfer import CudaMemory, pinned_array
from tests.factories.fake_cuda import FakeDriver, FakeHost
from tests.factories.kv_blocks import block_array

SHAPE = KVBlockShape(num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype=torch.float32)
CPU = torch.device("cpu")


def test_a_block_is_one_contiguous_span_of_bytes() -> None:
    pool = KVPool(5, SHAPE, CPU)
    pool.blocks_NLKHTD[2] = 1.0
    spans = block_array(pool)
    assert spans.shape == (5, SHAPE.size_bytes) == (5, 3 * 2 * 2 * 4 * 8 * 4)
    assert spans.flags["C_CONTIGUOUS"]
    assert spans[2].any()
    assert not spans[[0, 1, 3, 4]].any()


def test_block_bytes_share_memory_both_ways() -> None:
    pool = KVPool(4, KVBlockShape(1, 2, 4, 8, torch.bfloat16), CPU)
    pool.blocks_NLKHTD[3].normal_()
    copied = block_array(pool)[3].copy()
    block_array(pool)[1] = copied
    assert torch.equal(pool.blocks_NLKHTD[1], pool.blocks_NLKHTD[3])


def test_the_pool_starts_as_zeros() -> None:
    assert not np.any(block_array(KVPool(4, SHAPE, CPU)))


def test_slot_rows_write_each_key_and_value_to_its_place() -> None:
    pool, layer = KVPool(6, SHAPE, CPU), 1
    slots = torch.tensor([5 * 4 + 3, 2 * 4 + 0])
    kv = torch.randn(2, 2, SHAPE.num_kv_heads, SHAPE.head_dim)
    pool.layers[layer].slot_rows_RD.index_copy_(0, pool.slot_rows(slots), kv.view(-1, SHAPE.head_dim))
    assert torch.equal(pool.blocks_NLKHTD[5, layer, :, :, 3], kv[0])
    assert torch.equal(pool.blocks_NLKHTD[2, layer, :, :, 0], kv[1])
    assert pool.blocks_NLKHTD.count_nonzero() == kv.numel()


def test_block_rows_read_whole_contexts_heads_first() -> None:
    pool, layer = KVPool(6, SHAPE, CPU), 2
    pool.blocks_NLKHTD.normal_()
    tables = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)
    rows = pool.layers[layer].block_rows_RX[pool.block_rows(tables)]
    gathered = rows.view(2, 2, SHAPE.num_kv_heads, 3 * SHAPE.block_size, SHAPE.head_dim)
    for pair in (0, 1):
        for request, table in enumerate(tables.tolist()):
            expected = torch.cat([pool.blocks_NLKHTD[block, layer, pair] for block in table], dim=1)
            assert torch.equal(gathered[pair, request], expected)


def test_clear_from_zeroes_the_rest_of_a_block_in_every_layer() -> None:
    pool = KVPool(3, SHAPE, CPU)
    pool.blocks_NLKHTD.fill_(torch.nan)
    pool.clear_from(1, 3)
    assert pool.blocks_NLKHTD[1, :, :, :, 3:].count_nonzero() == 0
    assert pool.blocks_NLKHTD[1, :, :, :, :3].isnan().all()
    assert pool.blocks_NLKHTD[[0, 2]].isnan().all()


def test_fingerprints_of_unequal_pools_name_the_difference() -> None:
    ours = KVPool(3, SHAPE, CPU).fingerprint("digest")
    assert ours == KVPool(9, SHAPE, CPU).fingerprint("digest")
    assert (ours.dtype, ours.layout, ours.block_size) == ("float32", "LKHTD", 4)
    other = KVPool(3, KVBlockShape(3, 2, 4, 8, torch.float16), CPU).fingerprint("another")
    assert ours.differences(other) == ["model: digest != another", "dtype: float32 != float16"]


def test_memory_that_is_elsewhere_or_too_small_is_refused() -> None:
    needed = 4 * SHAPE.size_bytes
    with pytest.raises(AssertionError, match=f"{needed} bytes of blocks do not fit {needed - 1}"):
        KVPool(4, SHAPE, CPU, np.zeros(needed - 1, np.uint8))
    with pytest.raises(AssertionError, match="not on cpu"):
        KVPool(4, SHAPE, CPU, CudaMemory(needed, 0, FakeDriver(FakeHost())))
    with pytest.raises(AssertionError, match="cannot be memory of cuda:0"):
        KVPool(4, SHAPE, torch.device("cuda", 0), np.zeros(needed, np.uint8))


def test_a_fingerprint_counts_the_heads_of_all_ranks() -> None:
    whole = KVPool(3, KVBlockShape(3, 8, 4, 8, torch.float32), CPU).fingerprint("digest")
    quarter = KVPool(3, KVBlockShape(3, 2, 4, 8, torch.float32), CPU).fingerprint("digest", num_ranks=4)
    assert (quarter.num_kv_heads, quarter.num_ranks) == (8, 4)
    assert whole.differences(quarter) == []


LATENTS = KVBlockShape(3, 1, 4, 8, torch.float32, is_latent=True)


def test_a_block_of_latents_has_one_vector_of_a_token_and_layer() -> None:
    assert LATENTS.size_bytes == 3 * 4 * 8 * 4 == SHAPE.size_bytes / 4
    pool, layer = KVPool(6, LATENTS, CPU), 1
    latents_TD = torch.randn(2, 8)
    slots = torch.tensor([5 * 4 + 3, 2 * 4 + 0])
    pool.layers[layer].slot_rows_RD.index_copy_(0, pool.slot_rows(slots), latents_TD)
    assert torch.equal(pool.blocks_NLKHTD[5, layer, 0, 0, 3], latents_TD[0])
    assert torch.equal(pool.blocks_NLKHTD[2, layer, 0, 0, 0], latents_TD[1])
    assert pool.blocks_NLKHTD.count_nonzero() == latents_TD.numel()
    rows = pool.layers[layer].block_rows_RX[pool.block_rows(torch.tensor([[2, 5], [5, 0]]))].view(2, 8, 8)
    assert torch.equal(rows[0, 0], latents_TD[1])
    assert torch.equal(rows[0, 7], latents_TD[0])
    assert torch.equal(rows[1, 3], latents_TD[0])


def test_a_fingerprint_tells_latents_from_heads_and_not_the_number_of_ranks() -> None:
    pool = KVPool(3, LATENTS, CPU)
    whole, half = pool.fingerprint("digest"), pool.fingerprint("digest", num_ranks=2)
    assert (whole.layout, whole.num_planes, whole.num_divided_heads) == ("LTD", 3, None)
    assert whole.differences(half) == []
    heads = KVPool(3, KVBlockShape(3, 1, 4, 8, torch.float32), CPU).fingerprint("digest")
    assert (heads.num_planes, heads.num_divided_heads) == (6, 1)
    assert whole.differences(heads) == ["layout: LTD != LKHTD"]


def test_host_memory_for_a_gpu_is_pinned_just_as_much_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would pin the next power of two: of 9 GiB, 16."""
    host = FakeHost(pinned_room=5000)
    monkeypatch.setattr(kv_cache, "pinned_array", lambda size, _: pinned_array(size, 0, FakeDriver(host)))
    memory = host_memory(3000, torch.device("cuda", 0))
    assert (memory.dtype, memory.shape) == (torch.uint8, (3000,))
    assert [len(buffer) for buffer in host.pinned.values()] == [3000]
    with pytest.raises(ConfigError, match=r"cannot be pinned: .*out of memory.* engine.swap_space_mib"):
        host_memory(3 * 2**20, torch.device("cuda", 0))
    assert host_memory(0, torch.device("cuda", 0)).numel() == 0
    assert host_memory(7, CPU).shape == (7,)
    assert len(host.pinned) == 1


def test_blocks_come_back_from_host_memory_as_they_went() -> None:
    pool = KVPool(4, SHAPE, CPU)
    pool.blocks_NLKHTD[1:3].normal_()
    before = pool.blocks_NLKHTD.clone()
    host_blocks = HostBlocks(2, pool)
    host_blocks.swap(((1, 1), (2, 0)), ())
    pool.blocks_NLKHTD.zero_()
    host_blocks.swap((), ((1, 3), (0, 1)))
    assert torch.equal(pool.blocks_NLKHTD[3], before[1])
    assert torch.equal(pool.blocks_NLKHTD[1], before[2])
    assert not pool.blocks_NLKHTD[2].any()
