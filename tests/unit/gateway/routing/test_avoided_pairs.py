"""Pairs whose link failed: how long they are avoided, who tries them again, and what ends it."""

import logging

import pytest

from gateway.routing.avoided_pairs import FIRST_PAUSE_S, LONGEST_PAUSE_S, AvoidedPairs

PAIR, OTHER = ("p0", "d0"), ("p0", "d1")


def failed_at(now: float) -> AvoidedPairs:
    pairs = AvoidedPairs()
    pairs.failed(PAIR, now - 5.0, "silence", now)
    return pairs


def test_a_pair_is_avoided_for_a_pause_and_others_are_not() -> None:
    pairs = failed_at(5.0)
    assert pairs.at(5.0) == pairs.at(4.9 + FIRST_PAUSE_S) == {PAIR}
    assert pairs.at(5.0 + FIRST_PAUSE_S) == frozenset()
    assert len(pairs) == 1, "it has not worked since"


def test_after_the_pause_one_request_tries_it() -> None:
    pairs = failed_at(5.0)
    over = 5.0 + FIRST_PAUSE_S
    pairs.placed(OTHER, over)
    assert pairs.at(over) == frozenset()
    pairs.placed(PAIR, over)
    assert pairs.at(over) == {PAIR}, "the others wait for its end"
    assert pairs.at(over + FIRST_PAUSE_S) == frozenset(), "it may have ended without a word"


def test_each_failure_doubles_the_pause_up_to_a_limit() -> None:
    pairs, now, pauses = failed_at(0.0), 0.0, []
    for _ in range(6):
        began_at, now = now, next(t for t in range(10_000) if t > now and not pairs.at(float(t)))
        pauses.append(now - began_at)
        pairs.placed(PAIR, now)
        pairs.failed(PAIR, now, "silence", now)
    assert pauses == [30.0, 60.0, 120.0, 240.0, 300.0, 300.0]
    assert max(pauses) == LONGEST_PAUSE_S


def test_attempts_that_were_under_way_count_once() -> None:
    pairs = failed_at(5.0)
    for late_s in (0.0, 1.0, 4.0):
        pairs.failed(PAIR, 5.0, "silence", 5.0 + late_s)
    assert pairs.at(5.0 + FIRST_PAUSE_S) == frozenset()


def test_a_success_ends_it_and_the_next_pause_is_the_first_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pairs = failed_at(5.0)
    pairs.failed(PAIR, 40.0, "silence", 45.0)
    pairs.works(PAIR)
    pairs.works(PAIR)
    assert (len(pairs), pairs.at(46.0)) == (0, frozenset())
    pairs.failed(PAIR, 46.0, "silence", 50.0)
    assert pairs.at(50.0 + FIRST_PAUSE_S) == frozenset()
    avoided, again, anew = (record.getMessage() for record in caplog.records)
    assert avoided == anew == "KV cannot be transferred from p0 to d0; avoiding this pair: silence"
    assert again == "KV can be transferred from p0 to d0 again; no longer avoiding this pair"


@pytest.mark.parametrize("worker", PAIR)
def test_a_lost_worker_explains_its_failures(worker: str) -> None:
    pairs = failed_at(5.0)
    pairs.forget("p1")
    assert len(pairs) == 1
    pairs.forget(worker)
    assert (len(pairs), pairs.at(5.0)) == (0, frozenset())
