"""Stop strings within a run of right drafts or of forced tokens end an answer where they do without runs.

Outputs of whole engines, as a gateway turns them into a client's text.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from baton.request import FinishReason, RequestOutput
from gateway.requests.request import Delta
from tests.factories.models import make_tokenizer
from tests.factories.speculation import FORCED, FORCING, NGRAM, PLAIN, REPEATING, ROOMY, Workload, ask
from tests.factories.whole_engines import Answer, EnginesOf
from tests.unit.gateway.requests.test_request_state import make_state

NUM_REQUESTS = 36
TOKENIZER = make_tokenizer()


@dataclass(frozen=True, slots=True)
class Ended:
    """A client's answer."""

    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    matched_stop: str | None


def answer_to_client(outputs: Iterable[RequestOutput], stop: str) -> Ended:
    """The answer as a gateway delivers it."""
    state, text, token_ids = make_state(stop=(stop,)), "", list[int]()
    for output in outputs:
        delta = state.on_output("d0", output, 11.0)
        assert isinstance(delta, Delta)
        text += delta.text
        token_ids += delta.token_ids
        if delta.finish is not None:
            return Ended(text, tuple(token_ids), delta.finish.reason, delta.finish.matched_stop)
    raise AssertionError("the answer has no end")


def stops_within(answer: Answer, num_known: int) -> Iterator[tuple[str, int]]:
    """For each run, a string that ends with the second of its tokens and not before, and the number of tokens until
    then. `num_known`: the number of an output's tokens that were neither guessed nor forced."""
    whole = TOKENIZER.decode(answer.token_ids)
    for output in answer.outputs:
        num_tokens = output.first_position + 2
        before, until = (TOKENIZER.decode(answer.token_ids[:n]) for n in (num_tokens - 1, num_tokens))
        is_text = len(before) < len(until) and whole.startswith(until) and not before.endswith("\ufffd")
        if len(output.token_ids) - num_known >= 2 and is_text:
            suffixes = (until[-length:] for length in range(1, len(until) + 1))
            yield next(each for each in suffixes if whole.find(each) + len(each) == len(until)), num_tokens


@pytest.mark.parametrize(
    ("workload", "speculation"),
    [
        pytest.param(REPEATING, {**NGRAM, "forced_tokens": False}, id="c62: right drafts"),
        pytest.param(FORCING, FORCED, id="c64: forced tokens"),
    ],
)
def test_c62_c64_a_stop_string_within_a_run_ends_the_text_where_it_does_without(
    engines: EnginesOf, workload: Workload, speculation: dict[str, Any]
) -> None:
    requests = workload.requests(NUM_REQUESTS)
    plain = ask(engines, engines.start("plain", speculation=PLAIN, **ROOMY), requests)
    answers = ask(engines, engines.start("runs", speculation=speculation, **ROOMY), requests)
    num_stops = 0
    for name, answer in answers.items():
        for stop, num_tokens in stops_within(answer, num_known=1):
            ended = answer_to_client(answer.outputs, stop)
            assert ended == answer_to_client(plain[name].outputs, stop), (name, stop)
            assert ended.reason is FinishReason.STOP
            assert ended.matched_stop == stop
            assert len(ended.token_ids) == num_tokens
            assert TOKENIZER.decode(answer.token_ids).startswith(ended.text + stop)
            num_stops += 1
    assert num_stops > 20
