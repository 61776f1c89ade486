"""A little of what `python -m tests.e2e.speculation` plays."""

import pytest

from tests.e2e.speculation import METHODS, NUM_AT_ONCE, play


@pytest.mark.slow
def test_c62_c64_the_command_finds_equal_answers() -> None:
    assert play("cpu", METHODS, ["handed over"], 8) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["alone", "16 at once", "handed over", "recomputed", "swapped"])
def test_c27_c62_c64_the_command_finds_equal_answers_with_windows(way: str) -> None:
    """Drafts that are wrong, and runs of forced tokens, cross the end of a window."""
    assert play("cpu", ["ngram of 8, forced tokens"], [way], 24, "windows") == []


@pytest.mark.by_hand  # starts many processes, one after another
def test_c62_requests_of_a_killed_worker_go_on_with_drafts() -> None:
    assert play("cpu", ["ngram"], ["killed"], 2 * NUM_AT_ONCE) == []
