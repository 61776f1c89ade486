"""Requests whose worker is killed while it drafts; `python -m tests.e2e.speculation` plays far more, and other ways."""

import pytest

from tests.e2e.speculation import NUM_AT_ONCE, play

pytestmark = pytest.mark.slow


def test_c62_requests_of_a_killed_worker_go_on_with_drafts() -> None:
    assert play("cpu", ["ngram"], ["killed"], NUM_AT_ONCE) == []
