"""Behaviour 56: suspects take turns on a worker, and the worker knows which of them run."""

import pytest

from baton.request import SUSPECT_TURN_S, EngineRequest, ErrorKind, FinishReason, RequestOutput
from baton.sampling import SamplingParams
from worker.suspect_turns import RESERVED_S, SuspectTurns


def suspect(name: str, *output_token_ids: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=(1,),
        sampling_params=SamplingParams(),
        output_token_ids=output_token_ids,
        is_suspect=True,
    )


def test_c56_another_suspect_is_refused_until_the_turn_is_over() -> None:
    turns = SuspectTurns()
    assert turns.begin("g1", suspect("a"), 0.0) is None
    assert not turns.is_free(SUSPECT_TURN_S - 0.1)
    refused = turns.begin("g1", suspect("b"), SUSPECT_TURN_S - 0.1)
    assert refused is not None
    assert (refused.request_id, refused.error_kind) == ("b", ErrorKind.OVERLOADED)
    assert turns.running() == ("a",)
    assert turns.is_free(SUSPECT_TURN_S)


def test_c56_a_suspect_whose_turn_has_passed_may_still_run_and_is_named() -> None:
    turns = SuspectTurns()
    turns.begin("g1", suspect("a"), 0.0)
    assert turns.running() == ("a",)
    assert turns.begin("g1", suspect("b"), SUSPECT_TURN_S) is None
    assert turns.running() == ("a", "b")
    turns.conclude("a", SUSPECT_TURN_S + 1.0)
    assert turns.running() == ("b",)


@pytest.mark.parametrize("ends_at", [1.0, SUSPECT_TURN_S])
def test_c56_who_was_refused_first_begins_next(ends_at: float) -> None:
    """Its gateway learns of the end last, since the other one gets the last output before the heartbeat."""
    turns = SuspectTurns()
    turns.begin("g1", suspect("a"), 0.0)
    assert turns.begin("g2", suspect("x"), 0.5) is not None
    if ends_at < SUSPECT_TURN_S:
        turns.conclude("a", ends_at)
    assert turns.begin("g1", suspect("b"), ends_at) is not None
    assert turns.begin("g2", suspect("x"), ends_at + 0.5) is None
    turns.conclude("x", ends_at + 0.6)
    assert turns.begin("g1", suspect("b"), ends_at + 0.6) is None


def test_c56_a_place_is_not_kept_for_long() -> None:
    turns = SuspectTurns()
    turns.begin("g1", suspect("a"), 0.0)
    turns.begin("g2", suspect("x"), 0.5)
    turns.conclude("a", 1.0)
    assert turns.begin("g1", suspect("b"), 1.0 + RESERVED_S) is None


def test_c56_a_suspect_is_held_until_its_own_client_has_read_that_it_is_named() -> None:
    turns = SuspectTurns()
    turns.begin("g1", suspect("a"), 0.0)
    assert turns.release("g2", "a") is None
    assert turns.release("g1", "another") is None
    assert turns.release("g1", "a") == suspect("a")
    assert turns.release("g1", "a") is None, "it runs only once"
    assert turns.running() == ("a",)


def test_c56_a_turn_ends_with_its_held_suspect_but_not_with_one_that_runs() -> None:
    turns = SuspectTurns()
    turns.begin("g1", suspect("a"), 0.0)
    assert not turns.drop("g2", ["a"], 0.5)
    assert not turns.drop("g1", ["b"], 0.5)
    assert turns.drop("g1", ["a"], 0.5) == [suspect("a")]
    assert turns.is_free(0.5)
    assert turns.release("g1", "a") is None
    turns.begin("g1", suspect("b"), 1.0)
    turns.release("g1", "b")
    assert not turns.drop("g1", None, 1.5), "its last output ends its turn"
    assert turns.running() == ("b",)
    turns.conclude("b", 2.0)
    turns.begin("g1", suspect("c"), 2.0)
    assert turns.drop("g1", None, 2.5)
    assert turns.running() == ()


@pytest.mark.parametrize(
    ("output", "is_over"),
    [
        (RequestOutput(request_id="b", first_position=0, finish_reason=FinishReason.STOP), False),
        (RequestOutput(request_id="a", first_position=2, token_ids=(7,)), False),
        (RequestOutput(request_id="a", first_position=3, token_ids=(7,)), True),
        (RequestOutput(request_id="a", first_position=2, token_ids=(7, 8)), True),
        (RequestOutput(request_id="a", first_position=2, finish_reason=FinishReason.HANDED_OVER), True),
    ],
)
def test_c56_a_turn_ends_with_its_suspect_or_with_its_second_token(
    output: RequestOutput, is_over: bool
) -> None:
    turns = SuspectTurns()
    turns.begin("g", suspect("a", 5, 6), 0.0)
    assert turns.end_turns([output, output], 1.0) is is_over  # two steps may end at once
    assert turns.running() == (() if is_over else ("a",))
    assert turns.end_turns([output], 1.0) is False
