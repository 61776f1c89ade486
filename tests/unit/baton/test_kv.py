"""Fingerprints: an error names the difference of two pools."""

from dataclasses import replace

from baton.kv import KVFingerprint

OURS = KVFingerprint(2, "m", "bfloat16", "LKHTD", 30, 3, 64, 16, 1)


def test_equal_fingerprints_have_no_differences() -> None:
    assert OURS.differences(replace(OURS)) == []


def test_c43_each_differing_field_is_named() -> None:
    theirs = replace(OURS, dtype="float32", head_dim=32)
    assert OURS.differences(theirs) == ["dtype: bfloat16 != float32", "head_dim: 64 != 32"]


def test_block_sizes_and_ranks_may_differ() -> None:
    assert OURS.differences(replace(OURS, block_size=32, num_ranks=2)) == []
