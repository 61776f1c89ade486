"""Behaviour 56: a worker runs one suspect at a time, and knows which."""

import pytest

from baton.request import SUSPECT_TURN_S, EngineRequest, ErrorKind, FinishReason, RequestOutput
from baton.sampling import SamplingParams
from worker.suspect_turn import SuspectTurn


def suspect(name: str, *output_token_ids: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=(1,),
        sampling_params=SamplingParams(),
        output_token_ids=output_token_ids,
        is_suspect=True,
    )


def test_c56_another_gateways_suspect_is_refused_until_the_turn_is_over() -> None:
    turn = SuspectTurn()
    assert turn.begin("g1", suspect("a"), 0.0) is None
    refused = turn.begin("g2", suspect("b"), SUSPECT_TURN_S - 0.1)
    assert refused is not None
    assert (refused.request_id, refused.error_kind) == ("b", ErrorKind.OVERLOADED)
    assert turn.current(SUSPECT_TURN_S - 0.1) == "a"
    assert turn.current(SUSPECT_TURN_S) is None
    assert turn.begin("g2", suspect("b"), SUSPECT_TURN_S) is None
    assert turn.begin("g2", suspect("c"), SUSPECT_TURN_S) is None, "its gateway has aborted the other"
    assert turn.current(SUSPECT_TURN_S) == "c"


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
    turn = SuspectTurn()
    turn.begin("g", suspect("a", 5, 6), 0.0)
    assert turn.note([output]) is is_over
    assert (turn.current(1.0) is None) is is_over
    assert turn.note([output]) is False
