"""KV groups by hand-computed examples: which rows have left a window, and what fits into a pool."""

import pytest

from baton.errors import ConfigError
from baton.kv_groups import ONE_GROUP, KVGroups

TWO = KVGroups(num_full=1, num_windowed=1, window=8)


@pytest.mark.parametrize(
    ("num_computed", "num_before_window"),
    [
        (0, 0),
        (7, 0),
        (10, 0),  # token 10 attends to 3 to 10: to row 0
        (11, 1),  # token 11 attends to 4 to 11
        (14, 1),
        (15, 2),
        (100, 23),  # token 100 attends to 93 to 100, and row 23 begins with 92
    ],
)
def test_a_row_is_before_the_window_when_the_next_token_attends_to_none_of_its_tokens(
    num_computed: int, num_before_window: int
) -> None:
    assert TWO.num_rows_before_window(num_computed, 4) == num_before_window
    assert TWO.leaves_at(num_before_window, 4) > num_computed
    assert num_before_window == 0 or TWO.leaves_at(num_before_window - 1, 4) <= num_computed
    assert ONE_GROUP.num_rows_before_window(num_computed, 4) == 0


def test_needed_entries_are_all_of_full_groups_and_the_window_of_the_others() -> None:
    assert ONE_GROUP.needed_entries(9, 4) == [0, 1, 2]
    assert TWO.needed_entries(9, 4) == [0, 1, 2, 3, 4, 5]
    assert TWO.needed_entries(15, 4) == [0, 2, 4, 5, 6, 7]
    assert KVGroups(0, 2, 8).needed_entries(15, 4) == [4, 5, 6, 7]
    assert KVGroups(2, 1, 8).needed_entries(15, 4) == [0, 1, 3, 4, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("groups", "num_blocks", "most_per_step", "num_rows"),
    [
        (ONE_GROUP, 10, 4, 10),
        (ONE_GROUP, 10, 4000, 10),
        (TWO, 10, 4, 6),  # at most 4 rows of the window: ceil((8 - 1 + 4) / 4) + 1
        (TWO, 7, 4, 3),  # fewer rows than that: both groups have a block in each
        (TWO, 8, 4, 4),
        (TWO, 10, 100, 5),  # a step of 100 tokens has them all in both groups
        (KVGroups(1, 5, 8), 30, 4, 10),
        (KVGroups(0, 1, 8), 4, 4, None),
        (KVGroups(0, 1, 8), 3, 4, 3),
    ],
)
def test_the_longest_request_of_a_pool(
    groups: KVGroups, num_blocks: int, most_per_step: int, num_rows: int | None
) -> None:
    assert groups.most_rows(num_blocks, 4, most_per_step) == num_rows


@pytest.mark.parametrize("groups", [ONE_GROUP, TWO, KVGroups(2, 3, 9), KVGroups(0, 1, 8)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 15, 16, 17, 100])
def test_the_fewest_blocks_for_one_request(groups: KVGroups, num_tokens: int) -> None:
    fewest = groups.num_blocks_for_one(num_tokens, 4, 6)
    num_rows, one_less = groups.most_rows(fewest, 4, 6), groups.most_rows(fewest - 1, 4, 6)
    assert num_rows is None or num_rows * 4 >= num_tokens
    assert one_less is not None
    assert one_less * 4 < num_tokens


def test_a_request_of_gemma_3_holds_less_than_half_of_what_one_group_would() -> None:
    """18 layers in groups of three, of which five groups attend to 512 tokens; blocks of 16 tokens."""
    groups, num_tokens = KVGroups(1, 5, 512), 3_000
    num_held = groups.num_held_blocks(num_tokens + 1, 16)
    assert num_held == 188 + 5 * (188 - (3_000 - 511) // 16)
    assert num_held / (6 * 188) <= 0.45


@pytest.mark.parametrize(
    ("num_full", "num_windowed", "window"), [(0, 0, 0), (1, 1, 0), (1, 1, 1), (1, 0, 8), (-1, 2, 8)]
)
def test_groups_that_make_no_sense_are_refused(num_full: int, num_windowed: int, window: int) -> None:
    with pytest.raises(ConfigError, match="kv groups: "):
        KVGroups(num_full, num_windowed, window)
