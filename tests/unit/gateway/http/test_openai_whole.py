"""Whole answers of OpenAI's API are written in pieces: byte for byte what their shapes say, and little in one turn."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter
from starlette.types import Message

from baton.request import FinishReason, TokenLogprobs
from baton.sampling import SamplingParams
from gateway.choices import PORTION_TOKENS
from gateway.http.generated import GeneratedResponse
from gateway.http.openai.answers import (
    MIN_LOGPROB,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessageAnswer,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    ContentLogprob,
    PromptTokensDetails,
    TokenLogprob,
    Usage,
)
from gateway.http.openai.chat import ChatAnswer
from gateway.http.openai.choices import UsageCount
from gateway.http.openai.completions import CompletionAnswer
from gateway.http.openai.logprobs import (
    TOKENS_PER_PIECE,
    ChatTokens,
    CompletionLogprobsStream,
    CompletionTokens,
    LogprobColumns,
    token_name,
)
from gateway.http.openai.openai_answer import AnswerHead, OpenAIAnswer
from gateway.http.whole_json import PIECE_CHARACTERS
from gateway.requests.request import Delta, Finish, GatewayRequest
from gateway.text import Detokenizer, TextStream, Tokenizer, num_before
from gateway.turn_budget import TURN_S
from tests.factories.answers import Answering, WorkClock, finish_of, long_answer, top_of

HEAD = AnswerHead('a"b', 7, "módel")
PROMPT = (5, 6, 7)
MAX_PIECE = 200 * 1000
"""Characters: 48 tokens with 20 others each, or a piece of text in which every character needs six."""

PIECE_S = TURN_S / 4


def pieces_of(writer: OpenAIAnswer, answers: Sequence[Sequence[Delta]]) -> list[str]:
    for index, deltas in enumerate(answers):
        for delta in deltas:
            writer.on_delta(index, delta)
    return list(writer.whole())


def usage_of(answers: Sequence[Sequence[Delta]]) -> Usage:
    """The usage of two answers to one prompt."""
    num_tokens = sum(len(delta.token_ids) for deltas in answers for delta in deltas)
    return Usage(len(PROMPT), num_tokens, len(PROMPT) + num_tokens, PromptTokensDetails(3))


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def positions_of(deltas: Sequence[Delta]) -> list[TokenLogprobs]:
    return [position for delta in deltas for position in delta.logprobs]


def one_go_chat(tokenizer: Tokenizer, answers: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
    def token(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = tokenizer.token_bytes(token_id)
        return raw.decode(errors="replace"), max(logprob, MIN_LOGPROB), list(raw)

    def content(position: TokenLogprobs) -> ContentLogprob:
        top = [TokenLogprob(*token(*each)) for each in position.top]
        return ContentLogprob(*token(position.token_id, position.logprob), top)

    choices = [
        ChatChoice(
            index,
            ChatMessageAnswer("assistant", text_of(deltas)),
            ChatLogprobs([content(each) for each in positions])
            if (positions := positions_of(deltas))
            else None,
            "length",
        )
        for index, deltas in enumerate(answers)
    ]
    answer = ChatCompletion(HEAD.id, "chat.completion", HEAD.created, HEAD.model, choices, usage)
    return TypeAdapter(ChatCompletion).dump_json(answer)


def one_go_completion(
    tokenizer: Tokenizer, answers: Sequence[Sequence[Delta]], echoes: Sequence[str], usage: Usage
) -> bytes:
    def name(token_id: int) -> str:
        return token_name(tokenizer.token_bytes(token_id))

    def logprobs(positions: Sequence[TokenLogprobs]) -> CompletionLogprobs | None:
        if not positions:
            return None
        detokenizer = Detokenizer(tokenizer.backend, True, PROMPT)
        offsets, offset = [], 0
        for position in positions:
            text = detokenizer.push(position.token_id)
            offsets.append(offset + num_before(text, tokenizer.token_bytes(position.token_id)))
            offset += len(text)
        return CompletionLogprobs(
            [name(each.token_id) for each in positions],
            [max(each.logprob, MIN_LOGPROB) for each in positions],
            [top_of(tokenizer, each) for each in positions],
            offsets,
        )

    choices = [
        CompletionChoice(index, echo + text_of(deltas), logprobs(positions_of(deltas)), "length")
        for index, (deltas, echo) in enumerate(zip(answers, echoes, strict=True))
    ]
    answer = Completion(HEAD.id, "text_completion", HEAD.created, HEAD.model, choices, usage)
    return TypeAdapter(Completion).dump_json(answer)


@pytest.mark.parametrize("num_top", [None, 0, 1, 20])
@pytest.mark.parametrize("num_tokens", [1, TOKENS_PER_PIECE, 700])
def test_a_chat_in_pieces_equals_one_that_is_written_at_once(
    tokenizer: Tokenizer, num_tokens: int, num_top: int | None
) -> None:
    answers = [long_answer(tokenizer, num_tokens + more, num_top, 7) for more in (0, 1)]
    count = UsageCount(len(PROMPT), num_samples=2)
    pieces = pieces_of(
        ChatAnswer(HEAD, count, None, None if num_top is None else ChatTokens(tokenizer), [None, None]),
        answers,
    )
    assert "".join(pieces).encode() == one_go_chat(tokenizer, answers, usage_of(answers))
    assert max(map(len, pieces)) < MAX_PIECE


@pytest.mark.parametrize("num_top", [None, 0, 1, 20])
@pytest.mark.parametrize("num_tokens", [1, TOKENS_PER_PIECE, 700])
def test_a_completion_in_pieces_equals_one_that_is_written_at_once(
    tokenizer: Tokenizer, num_tokens: int, num_top: int | None
) -> None:
    answers = [long_answer(tokenizer, num_tokens + more, num_top, 7) for more in (0, 1)]
    echoes = ["", '"é\n' * PIECE_CHARACTERS] if num_top is None else ["", ""]
    tokens = CompletionTokens(tokenizer)
    logprobs = None if num_top is None else [CompletionLogprobsStream(tokens, True, PROMPT) for _ in answers]
    count = UsageCount(len(PROMPT), num_samples=2)
    pieces = pieces_of(CompletionAnswer(HEAD, count, None, echoes, logprobs), answers)
    assert "".join(pieces).encode() == one_go_completion(tokenizer, answers, echoes, usage_of(answers))
    assert max(map(len, pieces)) < MAX_PIECE


def test_an_answer_without_tokens_has_empty_lists(tokenizer: Tokenizer) -> None:
    chat = "".join(ChatTokens(tokenizer).write(LogprobColumns()))
    assert chat == '{"content":[],"refusal":null}'
    completion = "".join(
        CompletionLogprobsStream(CompletionTokens(tokenizer), True, PROMPT).write(LogprobColumns())
    )
    assert completion == '{"tokens":[],"token_logprobs":[],"top_logprobs":[],"text_offset":[]}'


class Watched(ChatAnswer):
    """Writes each piece in a quarter of a turn."""

    clock: WorkClock

    def whole(self) -> Iterator[str]:
        for piece in super().whole():
            self.clock.work(PIECE_S)
            yield piece


def test_no_turn_of_the_event_loop_collects_or_writes_much(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds if thousands of tokens come at once, with twenty log-probabilities each."""
    deltas = long_answer(tokenizer, 3000, 20, 2999)
    clock = WorkClock()
    portions = []
    extend = LogprobColumns.extend

    def noted(columns: LogprobColumns, logprobs: Sequence[TokenLogprobs]) -> None:
        clock.work(PIECE_S)
        portions.append(len(logprobs))
        extend(columns, logprobs)

    monkeypatch.setattr(LogprobColumns, "extend", noted)
    generations = [generation_of(tokenizer) for _ in range(2)]
    count = UsageCount.of(generations, 2, counts_reasoning=True)
    answer = Watched(HEAD, count, None, ChatTokens(tokenizer), [None, None])
    answer.clock = clock
    driver: Any = Answering(deltas)
    response = GeneratedResponse(driver, generations, answer, {}, is_stream=False)
    bodies: list[bytes] = []

    async def send(message: Message) -> None:
        bodies.append(message.get("body", b""))

    async def receive() -> Message:
        return await asyncio.Event().wait() and {}

    clock.run(response({"type": "http"}, receive, send))
    details = (PromptTokensDetails(3), CompletionTokensDetails(0))
    usage = Usage(len(PROMPT), 6000, 6000 + len(PROMPT), *details)
    assert b"".join(bodies) == one_go_chat(tokenizer, [deltas, deltas], usage)
    assert (sum(portions), max(portions)) == (6000, PORTION_TOKENS)
    assert clock.longest_turn_s < 1.5 * TURN_S


@pytest.mark.parametrize(
    ("finish", "reason", "stop_reason"),
    [
        (finish_of(FinishReason.STOP), "stop", None),
        (finish_of(FinishReason.STOP, stop_reason='"é'), "stop", '"é'),
        (finish_of(FinishReason.STOP, stop_reason=0), "stop", 0),
        (finish_of(FinishReason.LENGTH), "length", None),
    ],
)
@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
def test_an_answer_tells_what_stopped_it(
    kind: type[ChatAnswer | CompletionAnswer], finish: Finish, reason: str, stop_reason: str | int | None
) -> None:
    """As in vLLM, the field `stop_reason` says this, in a whole answer and in the last event of a stream."""
    first, last = (Delta((5,), "a"), Delta((6,), "b", finish=finish))

    def writer() -> ChatAnswer | CompletionAnswer:
        count = UsageCount(len(PROMPT), num_samples=1)
        if kind is ChatAnswer:
            return ChatAnswer(HEAD, count, None, None, [None])
        return CompletionAnswer(HEAD, count, None, [""], None)

    (whole,) = json.loads("".join(pieces_of(writer(), [[first, last]])))["choices"]
    stream = writer()
    pieces = [stream.piece(0, delta).removeprefix(b"data: ") for delta in (first, last)]
    (before,), (end,) = (json.loads(piece)["choices"] for piece in pieces)
    assert (before["finish_reason"], "stop_reason" in before) == (None, False)
    for choice in (whole, end):
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop_reason)


def generation_of(tokenizer: Tokenizer, **params: Any) -> GatewayRequest:
    text = TextStream(tokenizer.backend, (), 0, True, PROMPT)
    return GatewayRequest(
        request_id="r", prompt_token_ids=PROMPT, sampling_params=SamplingParams(**params), text=text
    )
