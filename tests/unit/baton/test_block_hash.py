"""Block hashes: what every process computes alike, and what must make a difference."""

import pytest

from baton.block_hash import DIGEST_BYTES, block_hashes, extend_block_hashes

KEY = b"k" * 16


def test_full_blocks_are_hashed_as_every_other_process_does_it() -> None:
    """Pinned: a router of another version would not recognize a prefix."""
    hashes = block_hashes(range(40), 16, KEY)
    assert [len(each) for each in hashes] == [DIGEST_BYTES] * 2
    assert hashes[0].hex()[:16] == "37e6709a8e070f77"
    assert hashes[1].hex()[:16] == "47ff6629c5907fee"


def test_tokens_may_come_a_few_at_a_time() -> None:
    hashes: list[bytes] = []
    for end in (3, 16, 31, 70):
        extend_block_hashes(hashes, range(end), 16, KEY, "salt")
    assert hashes == block_hashes(range(70), 16, KEY, "salt")


@pytest.mark.parametrize(
    ("key", "salt", "first_token"), [(b"l" * 16, None, 0), (KEY, "", 0), (KEY, "salt", 0), (KEY, None, 99)]
)
def test_another_key_salt_or_beginning_changes_every_hash(
    key: bytes, salt: str | None, first_token: int
) -> None:
    ours = block_hashes([0, *range(1, 48)], 16, KEY)
    theirs = block_hashes([first_token, *range(1, 48)], 16, key, salt)
    assert len(ours) == 3
    assert not set(ours) & set(theirs)
