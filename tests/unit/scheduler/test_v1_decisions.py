"""Step by step what vLLM's V1 scheduler decided for recorded workloads; `benchmarks/v1_decisions.py` records them.

If a difference from V1 is intended, add it to the list there, and remove its workloads from the recordings.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.kv_groups import KVGroups
from benchmarks.baton_side import BatonSide
from benchmarks.draft_workloads import BY_HAND
from benchmarks.scheduler_play import play
from benchmarks.scheduler_workloads import Settings, Workload
from benchmarks.v1_decisions import KINDS, Recorded, first_difference, read_recorded
from benchmarks.window_workloads import BY_HAND as WINDOWS_BY_HAND
from scheduler import Request
from scheduler.speculation import Speculation
from scheduler.step import StepPlan

FOLDER = Path(__file__).resolve().parents[2] / "data" / "v1_decisions"
ENOUGH = 5
"""Workloads that have to show a mistake; the others are not played."""


@cache
def recorded(kind: str) -> list[Recorded]:
    return read_recorded(FOLDER, kind)


def decide(workload: Workload, *, is_async: bool = False) -> list[str]:
    return [str(step) for step in play(BatonSide(workload.settings, is_async=is_async), workload)]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_c61_every_step_is_what_v1_decided(kind: str, is_async: bool) -> None:
    """`drafts` is a kind of workloads, too, and `windows`."""
    for workload, expected in recorded(kind):
        difference = first_difference(expected, decide(workload, is_async=is_async))
        assert difference is None, f"workload {workload.seed}, {workload.settings}\n{difference}"


@pytest.mark.parametrize(("kind", "by_hand"), [("drafts", BY_HAND), ("windows", WINDOWS_BY_HAND)])
def test_workloads_made_by_hand_are_recorded_as_they_are(kind: str, by_hand: dict[str, Workload]) -> None:
    made = [workload for workload, _ in recorded(kind) if workload.seed < 0]
    assert made == list(by_hand.values())


def test_the_recordings_are_full_of_what_schedulers_get_wrong() -> None:
    words: Counter[str] = Counter()
    for kind in KINDS:
        for _, steps in recorded(kind):
            words.update(_sort_of(word) for step in steps for word in step.split())
    sorts = ("decode", "chunk", "hit", "preempted", "stop", "length", "drafts")
    assert all(words[sort] >= 100 for sort in sorts), words


def _sort_of(word: str) -> str:
    if word.startswith("-"):
        return "preempted"
    if "=" in word:
        return word.partition("=")[2]
    if "~" in word:
        return "drafts"
    if "@" in word:
        return "miss" if word.endswith("@0") else "hit"
    return "decode" if word.endswith(":1") else "chunk"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("policy", lambda value: "fcfs" if value == "priority" else "priority"),
        ("max_num_seqs", lambda value: value + 1),
        ("max_num_batched_tokens", lambda value: value + 1),
        ("long_prefill_token_threshold", lambda value: value + 1),
        ("enable_prefix_caching", lambda value: not value),
        ("enable_chunked_prefill", lambda _value: True),
        ("num_blocks", lambda value: value + 1),
        ("max_model_len", lambda value: value + 1),
    ],
)
def test_a_scheduler_that_mistakes_a_setting_is_found_out(name: str, change: Callable[[Any], Any]) -> None:
    recordings = [
        (workload, expected)
        for workload, expected in [*recorded("fcfs"), *recorded("priority")]
        if workload.settings.enable_chunked_prefill or name == "enable_chunked_prefill"
    ]
    assert_found_out(
        recordings, lambda settings: replace(settings, **{name: change(getattr(settings, name))})
    )


def assert_found_out(
    recordings: Iterable[Recorded],
    change: Callable[[Settings], Settings] = lambda settings: settings,
    enough: int = ENOUGH,
    found_by: tuple[type[Exception], ...] = (),
) -> None:
    """An error of `found_by` counts as found out, too. A workload whose longest request does not fit proves nothing."""
    num_found = 0
    for workload, expected in recordings:
        try:
            got = decide(replace(workload, settings=change(workload.settings)))
            num_found += first_difference(expected, got) is not None
        except found_by:
            num_found += 1
        except InvalidRequest:
            pass
        if num_found == enough:
            return
    raise AssertionError(f"only {num_found} workloads show it")


def forget_to_step_back(original: Any, self: Speculation, request: Request, *counts: int) -> None:
    num_computed_tokens = request.num_computed_tokens
    original(self, request, *counts)
    request.num_computed_tokens = min(num_computed_tokens, request.num_computed_tokens + 1)


def go_past_the_context(
    _original: Any, _self: Speculation, request: Request, num_wanted: int, _num_computed: int
) -> int:
    return num_wanted + len(request.spec_token_ids)


def drop_a_draft(original: Any, self: Speculation, request: Request, num_tokens: int, step: StepPlan) -> None:
    original(self, request, num_tokens, step)
    if len(drafts := step.spec_token_ids.get(request.request_id, ())) > 2:
        step.spec_token_ids[request.request_id] = drafts[:-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_drop_wrong_drafts", forget_to_step_back),
        ("num_wanted_tokens", go_past_the_context),
        ("schedule", drop_a_draft),
    ],
)
def test_c61_a_scheduler_that_mistakes_drafts_is_found_out(
    name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(Speculation, name)
    monkeypatch.setattr(Speculation, name, lambda *args: broken(original, *args))
    assert_found_out(recorded("drafts")[:30], enough=ENOUGH - 2, found_by=(AssertionError,))


@pytest.mark.parametrize(
    "change",
    [
        lambda settings: replace(settings, window=settings.window + settings.block_size),
        lambda settings: replace(settings, num_windowed=settings.num_windowed + 1),
        lambda settings: replace(settings, num_full=2, num_windowed=0, window=0),
    ],
    ids=["window", "one group more", "no window"],
)
def test_a_scheduler_that_mistakes_windows_is_found_out(change: Callable[[Settings], Settings]) -> None:
    assert_found_out(recorded("windows"), change)


def forget_the_window(_original: Any, _self: KVGroups, *_counts: int) -> int:
    return 0


def forget_a_row_too_early(original: Any, self: KVGroups, num_tokens: int, block_size: int) -> int:
    num_before_window: int = original(self, num_tokens, block_size)
    return num_before_window + (num_before_window > 0)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [forget_the_window, forget_a_row_too_early])
def test_a_scheduler_that_gives_back_the_wrong_blocks_is_found_out(
    broken: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = KVGroups.num_rows_before_window
    monkeypatch.setattr(KVGroups, "num_rows_before_window", lambda *args: broken(original, *args))
    assert_found_out(recorded("windows"), found_by=(AssertionError,))


def test_a_planted_difference_is_shown_with_the_steps_before_it() -> None:
    workload, expected = recorded("fcfs")[0]
    got = decide(workload)
    planted = [*expected[:5], expected[5] + " r9:1", *expected[6:]]
    difference = first_difference(planted, got)
    assert difference is not None
    assert difference.splitlines() == [
        *(f"  step {number}: {expected[number]}" for number in (2, 3, 4)),
        f"  step 5: V1    {planted[5]}",
        f"  step 5: Baton {expected[5]}",
    ]
    assert first_difference(got[:-1], got) is not None
    assert first_difference(got, got[:-1]) is not None
