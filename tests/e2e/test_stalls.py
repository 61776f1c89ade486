"""Streams stall for as long as it takes to notice a failure, and no longer; see tests/chaos/stalls.py."""

import asyncio

import pytest

from tests.chaos.stalls import main

pytestmark = pytest.mark.by_hand  # on a busy machine, times mean little


def test_c52_a_stall_is_detection_and_recomputing() -> None:
    report = asyncio.run(main(("kill", "stop", "cut link to peers"), each=1))
    assert report["wrong"] == []
    assert report["num_right"] > 0
    for row, figures in report["rows"].items():
        limit_s = 1.0 if row.startswith("kill") else 3.0
        assert figures["stalls"] == 0 or figures["detection_s"][1] + figures["move_s"][1] < limit_s, row
    assert sum(figures["stalls"] for figures in report["rows"].values()) > 0
