"""There is an output for every token: what it costs to encode and to decode is counted in calls of Python functions."""

import sys
from collections.abc import Callable
from types import FrameType

from baton.messages.request_plane import TO_GATEWAY, Outputs
from baton.request import ErrorKind, FinishReason, RequestOutput

NUM_OUTPUTS = 100
USUAL = Outputs(tuple(RequestOutput(f"r{number}", 1, (number,)) for number in range(NUM_OUTPUTS)))
AROUND = 20
"""Calls for the message itself, at most."""


def num_calls(run: Callable[[], object]) -> int:
    """How many Python functions were called while this ran."""
    num = 0

    def profile(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num
        num += event == "call"

    former = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(former)
    return num


def test_a_usual_output_is_encoded_in_two_calls() -> None:
    assert num_calls(lambda: TO_GATEWAY.encode(USUAL)) <= 2 * NUM_OUTPUTS + AROUND


def test_an_output_that_ends_its_request_costs_little_more() -> None:
    output = RequestOutput(
        "r",
        1,
        (7,),
        finish_reason=FinishReason.ERROR,
        error="its deadline passed",
        error_kind=ErrorKind.OVERLOADED,
    )
    message = Outputs((output,) * NUM_OUTPUTS)
    assert TO_GATEWAY.decode(TO_GATEWAY.encode(message)) == message
    assert num_calls(lambda: TO_GATEWAY.encode(message)) <= 3 * NUM_OUTPUTS + AROUND


def test_a_usual_output_is_decoded_in_six_calls() -> None:
    """For its id, its position, its tokens, the kind of an error that it does not have, itself, and its constructor."""
    data = TO_GATEWAY.encode(USUAL)
    assert num_calls(lambda: TO_GATEWAY.decode(data)) <= 6 * NUM_OUTPUTS + AROUND
