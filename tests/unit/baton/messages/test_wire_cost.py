"""The cost of encoding and decoding outputs, counted in calls of Python functions: there is an output for
every token."""

from baton.messages.request_plane import TO_GATEWAY, Outputs
from baton.request import ErrorKind, FinishReason, RequestOutput
from tests.factories.costs import calls_in

NUM_OUTPUTS = 100
USUAL = Outputs(tuple(RequestOutput(f"r{number}", 1, (number,)) for number in range(NUM_OUTPUTS)))
AROUND = 20
"""Calls for the message itself, at most."""


def test_a_usual_output_is_encoded_in_two_calls() -> None:
    assert calls_in(lambda: TO_GATEWAY.encode(USUAL)).total() <= 2 * NUM_OUTPUTS + AROUND


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
    assert calls_in(lambda: TO_GATEWAY.encode(message)).total() <= 3 * NUM_OUTPUTS + AROUND


def test_a_usual_output_is_decoded_in_six_calls() -> None:
    """One call each for its id, its position, its tokens, the kind of an error that it does not have, itself,
    and its constructor."""
    data = TO_GATEWAY.encode(USUAL)
    assert calls_in(lambda: TO_GATEWAY.decode(data)).total() <= 6 * NUM_OUTPUTS + AROUND
