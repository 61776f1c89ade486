"""Behaviour 56: which request is taken for the one that ends workers, which is not, and for how long."""

import pytest

from baton.request import SUSPECT_TURN_S
from baton.sampling import GrammarKind, StructuredOutput
from gateway.admission.suspects import (
    MAX_BLAMED,
    MAX_KEPT,
    MAX_LOSSES_IN_ALL,
    RECENT_S,
    REMEMBERED_S,
    Suspects,
    WorkerLoss,
    identity_of,
)

POISON, OTHER = b"poison", b"other"


def lose(
    suspects: Suspects, now: float, had: tuple[bytes, ...] = (), *, is_shared: bool = False, **places: int
) -> bytes | None:
    """A worker ends with the requests at these places. Returns the request that is stopped. `is_shared`: the turn was
    not the first request's."""
    at = {name.encode(): place for name, place in places.items()}
    ran_alone = None if is_shared else next(iter(at))
    found = suspects.worker_lost(WorkerLoss(at, frozenset([*at, *had]), ran_alone), now)
    return found[0] if found else None


@pytest.mark.parametrize(
    ("places", "stopped"),
    [
        ((0, 0, 0, 0, 0), True),
        ((0, 1, 2, 3, 4), True),  # each attempt's prefill worker brings one token
        ((16, 16, 16, 16, 16), True),
        ((0, 2, 2, 2, 2), False),
        ((5, 0, 0, 0, 0), False),
    ],
)
def test_c56_a_request_at_the_same_place_when_five_workers_ended_is_stopped(
    places: tuple[int, ...], stopped: bool
) -> None:
    suspects = Suspects()
    found = [lose(suspects, now, poison=place) for now, place in enumerate(places)]
    assert found == [None, None, None, None, POISON if stopped else None]
    assert (suspects.refusal(POISON, 5.0) is not None) is stopped
    assert suspects.counts["lost"] == suspects.counts["refused"] == stopped


def test_c56_one_of_two_with_the_same_losses_is_not_chosen() -> None:
    suspects, num_losses = Suspects(), MAX_LOSSES_IN_ALL
    lost = [lose(suspects, now, poison=0, other=0, is_shared=True) for now in range(num_losses)]
    assert lost == [None] * num_losses
    assert lose(suspects, 9.0, poison=0) == POISON, "alone"
    assert suspects.refusal(OTHER, 10.0) is None


def test_c56_a_suspect_is_not_blamed_for_workers_that_may_have_run_another() -> None:
    suspects = Suspects()
    for now in range(4):
        assert lose(suspects, now, other=0, is_shared=True) is None
    assert lose(suspects, 5.0, other=0) is lose(suspects, 6.0, other=0) is None
    assert lose(suspects, 7.0, other=0) == OTHER, "the third in its turn"


def test_c56_a_request_that_ends_workers_before_they_can_name_it_is_stopped_later() -> None:
    suspects, num_losses = Suspects(), MAX_LOSSES_IN_ALL
    lost = [lose(suspects, now, poison=0, is_shared=True) for now in range(num_losses)]
    assert lost == [None] * (num_losses - 1) + [POISON]


@pytest.mark.parametrize(
    ("elsewhere", "stopped"), [((), True), ((0.4, 0.5, 0.6, 0.7), True), ((0.3, 0.4, 0.5, 0.6, 0.7), False)]
)
def test_c56_workers_that_end_without_it_speak_for_a_request(
    elsewhere: tuple[float, ...], stopped: bool
) -> None:
    suspects = Suspects()
    lose(suspects, -RECENT_S, other=7)  # too long ago
    lose(suspects, 0.1, poison=0)
    for now in elsewhere:
        lose(suspects, now, other=int(100 * now))
    lose(suspects, 0.9, (POISON,), other=0)  # the other worker of its pair
    for _ in range(3):
        lose(suspects, 1.0, poison=0)
    assert (lose(suspects, 1.1, poison=0) == POISON) is stopped


def test_c56_suspects_run_one_at_a_time_until_they_get_further() -> None:
    suspects = Suspects()
    for now in (0.0, 1.0):
        lose(suspects, now, poison=0, other=0)
    suspects.placed(b"somebody", 2.0)
    assert suspects.may_run(POISON, 2.0)
    suspects.placed(POISON, 2.0)
    assert not suspects.may_run(OTHER, 3.0)
    assert suspects.may_run(b"somebody", 3.0)
    assert suspects.may_run(OTHER, 2.0 + SUSPECT_TURN_S)
    assert not suspects.got_further(POISON, 1)
    assert suspects.got_further(POISON, 2)
    assert not suspects.is_suspect(POISON)
    suspects.placed(OTHER, 3.0)
    assert suspects.end_turn(OTHER)
    suspects.cleared(OTHER)
    assert len(suspects) == 0


def test_c56_a_request_that_two_workers_cannot_compute_is_stopped() -> None:
    suspects = Suspects()
    suspects.finished_on(["w0-1", "w1-1"])
    assert suspects.step_failed(POISON, "w0-1", 0.0) is None
    assert suspects.step_failed(POISON, "w0-1", 1.0) is None, "the same worker"
    assert "2 workers could not compute the request" in str(suspects.step_failed(POISON, "w1-1", 2.0))
    assert suspects.num_stopped == 1


def test_c56_a_worker_that_can_compute_nothing_is_no_evidence() -> None:
    suspects = Suspects()
    suspects.finished_on(["wrong", "w1", "w2"])
    for number in range(MAX_BLAMED):
        suspects.step_failed(b"%d" % number, "wrong", 0.0)
    assert suspects.step_failed(POISON, "wrong", 0.0) is None
    assert suspects.step_failed(POISON, "w1", 1.0) is None
    assert suspects.step_failed(POISON, "w2", 2.0) is not None


def test_c56_two_damaged_workers_stop_few_requests_in_turn() -> None:
    """The workers stop each request that meets both of them before a third worker computes it."""
    suspects = Suspects()
    suspects.finished_on(["w0", "w1", "w2"])
    for number in range(MAX_BLAMED):
        assert suspects.step_failed(b"%d" % number, "w0", number) is None
        assert suspects.step_failed(b"%d" % number, "w1", number) is not None
        assert suspects.refusal(b"%d" % number, number) is not None
    for worker in ("w0", "w1", "w2"):
        assert suspects.step_failed(OTHER, worker, 10.0) is None
    later = 10.0 + REMEMBERED_S
    assert suspects.step_failed(POISON, "w0", later) is None
    assert suspects.step_failed(POISON, "w1", later) is not None, "what they did is forgotten"


def test_c56_workers_that_never_finished_an_answer_are_no_evidence() -> None:
    suspects = Suspects()
    suspects.finished_on(["w0"])
    for worker in ("w0", "w1", "w2"):
        assert suspects.step_failed(POISON, worker, 0.0) is None
    suspects.finished_on(["w1"])
    error = suspects.step_failed(POISON, "w2", 1.0)
    assert "2 workers could not compute the request" in str(error), "w2 has shown nothing"


def test_c56_it_is_remembered_for_minutes_after_it_last_came_and_memory_is_bounded() -> None:
    suspects = Suspects()
    suspects.finished_on(["w0", "w1"])
    for worker in ("w0", "w1"):
        suspects.step_failed(POISON, worker, 0.0)
    assert suspects.refusal(POISON, REMEMBERED_S - 1) is not None
    assert suspects.refusal(POISON, 2 * REMEMBERED_S - 2) is not None, "it came in between"
    assert suspects.refusal(POISON, 4 * REMEMBERED_S) is None
    for number in range(2 * MAX_KEPT):
        suspects.finished_on([f"a{number}", f"b{number}"])
        for worker in ("a", "b"):
            suspects.step_failed(b"%d" % number, f"{worker}{number}", 1e6)
        suspects.step_failed(b"%d " % number, "c", 1e6)
    assert len(suspects) == 2 * MAX_KEPT
    assert len(suspects._proven) == MAX_KEPT


def test_c56_a_suspect_is_forgotten_minutes_after_its_latest_loss() -> None:
    suspects = Suspects()
    for now in (0.0, REMEMBERED_S - 1):
        lose(suspects, now, poison=0)
    for now, num_known in ((2 * REMEMBERED_S - 2, 2), (2 * REMEMBERED_S - 1, 1)):
        lose(suspects, now, other=0)
        assert len(suspects) == num_known


def test_c56_equal_is_what_has_callers_name_prompt_and_grammar() -> None:
    def identity(caller: str = "", prompt: tuple[int, ...] = (1, 2), grammar: str = "") -> bytes:
        output = StructuredOutput(GrammarKind.REGEX, grammar) if grammar else None
        return identity_of(caller, prompt, output)

    others = [identity("a"), identity(prompt=(1, 2, 0)), identity(grammar="a"), identity(grammar="b")]
    assert identity() == identity()
    assert len({identity(), *others}) == 5
