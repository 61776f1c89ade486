"""Fingerprints: two pools that differ say in what."""

from dataclasses import replace

from baton.kv import KVFingerprint

OURS = KVFingerprint(1, "m", "bfloat16", "LKTHD", 16, 30, 3, 64)


def test_equal_fingerprints_have_no_differences() -> None:
    assert OURS.differences(replace(OURS)) == []


def test_c43_each_differing_field_is_named() -> None:
    theirs = replace(OURS, dtype="float32", block_size=32)
    assert OURS.differences(theirs) == ["dtype: bfloat16 != float32", "block_size: 16 != 32"]
