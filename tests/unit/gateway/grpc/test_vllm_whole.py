"""A response that is serialized piece by piece is the message that it would be at once."""

import pytest

from baton.request import FinishReason, PackedLogprobs
from gateway.grpc.generated import vllm_engine_pb2 as pb
from gateway.grpc.vllm_convert import (
    delta_to_chunk,
    end_without_tokens,
    input_logprobs_to_message,
    to_complete,
)
from gateway.grpc.vllm_whole import TOKENS_PER_PIECE, WholeResponse
from gateway.requests.request import Delta
from tests.factories.answers import finish_of, logprobs_of

ENDS = [
    finish_of(),
    finish_of(FinishReason.STOP, matched_stop="the end", num_cached_tokens=0),
    finish_of(FinishReason.STOP, stop_token_id=2),
]


@pytest.mark.parametrize("num_top", [None, 0, 5])
@pytest.mark.parametrize("num_tokens", [0, 1, TOKENS_PER_PIECE, 1000])
@pytest.mark.parametrize("tokens_each", [1, 3, 50])
def test_pieces_make_one_message(num_tokens: int, num_top: int | None, tokens_each: int) -> None:
    token_ids = tuple(range(num_tokens))
    # Such numbers as are equal to themselves.
    logprobs = () if num_top is None else tuple(logprobs_of(7 * id_, num_top) for id_ in token_ids)
    for number, finish in enumerate(ENDS):
        whole = WholeResponse(number, 5)
        for begin in range(0, num_tokens, tokens_each):
            end = begin + tokens_each
            whole.on_delta(Delta(token_ids[begin:end], logprobs=logprobs[begin:end]))
        at_once = to_complete(number, Delta(token_ids, logprobs=logprobs), finish)
        assert pb.GenerateResponse.FromString(whole.serialized(finish)) == at_once


@pytest.mark.parametrize("num_top", [0, 5])
@pytest.mark.parametrize("portions", [[0], [1], [128, 128, 3]])
def test_log_probabilities_of_a_prompt_become_one_message_too(portions: list[int], num_top: int) -> None:
    whole = WholeResponse(0, 9)
    logprobs = tuple(logprobs_of(7 * id_, num_top) for id_ in range(sum(portions)))
    rest = PackedLogprobs.of(logprobs)
    for number in portions[:-1]:
        whole.on_delta(Delta(prompt_logprobs=rest[:number]))
        rest = rest[number:]
    whole.on_delta(Delta((3,), prompt_logprobs=rest))
    complete = pb.GenerateResponse.FromString(whole.serialized(finish_of())).complete
    assert complete.input_logprobs == input_logprobs_to_message(logprobs, 9)
    assert list(complete.output_ids) == [3]
    first, *others = complete.input_logprobs.token_logprobs
    assert not first.HasField("value")
    assert [each.value for each in others] == pytest.approx([position.logprob for position in logprobs])
    assert list(complete.input_logprobs.token_ids) == [9, *(position.token_id for position in logprobs)]
    assert [len(top.values) for top in complete.input_logprobs.top_logprobs] == [0] + [num_top] * len(
        logprobs
    )


def test_only_the_last_chunk_has_what_only_an_ended_answer_has() -> None:
    chunks = [delta_to_chunk(1, Delta((7,), finish=finish), 5).chunk for finish in (None, *ENDS)]
    assert [chunk.cached_tokens for chunk in chunks] == [0, 3, 0, 3]
    ends = [end_without_tokens(1, 1, finish) for finish in ENDS]
    assert [end.WhichOneof("matched_stop") for end in ends] == [None, "matched_stop_str", "matched_token_id"]
    assert ends[2].matched_token_id == 2
