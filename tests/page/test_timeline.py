"""The spans that the live page draws at the end of a request; runs timeline.js in Node.js. Skipped without Node.js."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import gateway.http.page

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None, reason="Node.js is not installed: apt install nodejs"
)

TIMELINE = Path(gateway.http.page.__file__).parent / "timeline.js"
PRINTS_THE_TIMELINE = """
import { readFileSync } from "node:fs";
import { timeline } from "./timeline.mjs";
console.log(JSON.stringify(timeline(JSON.parse(readFileSync(0, "utf8")))));
"""


def timeline_of(end: dict[str, Any], folder: Path) -> dict[str, Any]:
    shutil.copy(TIMELINE, folder / "timeline.mjs")
    (folder / "print.mjs").write_text(PRINTS_THE_TIMELINE)
    command = ["node", "print.mjs"]
    ran = subprocess.run(
        command, cwd=folder, input=json.dumps(end), capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    timeline: dict[str, Any] = json.loads(ran.stdout)
    return timeline


def transfers(attempt: int, *, asked: float, first: float, prefilled: float, verified: float) -> list[object]:
    consumer = {"asked": asked, "first_piece": first, "verified": verified}
    producer = {"first_piece": first, "prefilled": prefilled, "released": verified}
    return [
        {"role": role, "attempt": attempt, "events": [{"name": n, "at_s": s} for n, s in events.items()]}
        for role, events in (("consumer", consumer), ("producer", producer))
    ]


def an_end(*, prefill: str | None, num_attempts: int, timing: dict[str, Any], seen: list[object]) -> Any:
    usual = {"ttft_s": 2.0, "prefill_s": 1.0, "attempt_began_s": 0.5, "num_tokens_before": 0}
    return {
        "timing": usual | timing,
        "placement": {"prefill": prefill, "decode": "w1"},
        "transfers": seen,
        "num_attempts": num_attempts,
    }


def test_the_stages_of_a_request_that_did_not_move(tmp_path: Path) -> None:
    seen = transfers(1, asked=0.75, first=1.5, prefilled=2.0, verified=2.25)
    end = an_end(prefill="w0", num_attempts=1, timing={"itl_s": [0.5, 0.5, 0.5], "total_s": 3.5}, seen=seen)
    assert timeline_of(end, tmp_path)["spans"] == {
        "queue": [[0, 1, "solid"]],
        "prefill": [[1, 2, "solid"]],
        "transfer": [[0.75, 1.5, "thin"], [1.5, 2.25, "solid"]],
        "decode": [[2.25, 3.5, "solid"]],
    }


@pytest.mark.parametrize("prefill", ["w2", None])
def test_a_request_that_moved_after_its_first_token_shows_the_stages_of_each_attempt(
    prefill: str | None, tmp_path: Path
) -> None:
    """Three tokens at 2, 2.5 and 3 s; then its worker is lost, and a second attempt begins at 5 s."""
    timing = {
        "itl_s": [0.5, 0.5, 4.0, 1.0, 0.5],
        "total_s": 8.5,
        "prefill_s": 1.5,
        "attempt_began_s": 5.0,
        "num_tokens_before": 3,
        "ttft_parts": {"prefill_s": 0.5},
    }
    seen = transfers(1, asked=0.75, first=1.5, prefilled=2.0, verified=2.25)
    if prefill is not None:
        seen += transfers(2, asked=5.25, first=6.0, prefilled=7.0, verified=7.5)
    end = an_end(prefill=prefill, num_attempts=2, timing=timing, seen=seen)
    spans = timeline_of(end, tmp_path)["spans"]
    assert spans["queue"] == [[0, 1.5, "solid"], [5, 5.5, "solid"]]
    assert spans["prefill"] == [[1.5, 2, "solid"], [5.5, 7, "solid"]]
    assert spans["transfer"] == ([[5.25, 6, "thin"], [6, 7.5, "solid"]] if prefill else [])
    assert spans["decode"] == [[2, 3, "solid"], [7.5 if prefill else 7, 8.5, "solid"]]


def test_a_transfer_of_an_attempt_that_failed_is_not_shown_for_the_next(tmp_path: Path) -> None:
    """The last attempt's hand-over was not reported before the answer ended."""
    seen = transfers(1, asked=0.1, first=0.2, prefilled=0.3, verified=0.4)
    end = an_end(prefill="w0", num_attempts=2, timing={"itl_s": [0.5], "total_s": 2.5}, seen=seen)
    spans = timeline_of(end, tmp_path)["spans"]
    assert spans["transfer"] == []
    assert spans["prefill"] == [[1, 2, "solid"]]
