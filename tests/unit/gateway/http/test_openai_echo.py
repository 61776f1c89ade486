"""Completions that repeat their prompt with its log-probabilities, and vLLM's field with those of the prompt."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from baton.request import FinishReason, TokenLogprobs
from gateway.choices import PORTION_TOKENS, prompt_parts
from gateway.http.openai.answers import (
    MIN_LOGPROB,
    ChatChoice,
    ChatCompletion,
    ChatMessageAnswer,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    Usage,
)
from gateway.http.openai.chat import ChatAnswer
from gateway.http.openai.choices import UsageCount
from gateway.http.openai.completions import CompletionAnswer
from gateway.http.openai.echo import EchoedPrompt
from gateway.http.openai.logprobs import (
    CompletionLogprobsStream,
    CompletionTokens,
    LogprobColumns,
    RankedTokens,
    token_name,
)
from gateway.http.openai.openai_answer import AnswerHead
from gateway.requests.request import Delta
from gateway.text import Tokenizer
from gateway.text.token_bytes import TokenBytes
from tests.factories.answers import finish_of, top_of
from tests.factories.gateway import prompt_logprobs_of

HEAD = AnswerHead("a", 7, "model")
MAX_PIECE = 200 * 1000
TYPED = "Hi <|im_start|>the caf\u00e9 \U0001f600<|im_end|> baton"
BEGIN = 1
"""A special token, as tokenizers put it before a text."""


def offsets_of(echo: EchoedPrompt, token_ids: Sequence[int]) -> list[int]:
    assert echo.take_first() == token_ids[0]
    assert echo.take_first() is None
    offsets = [0, *map(echo.next_offset, token_ids[1:])]
    assert echo.num_remaining == 0
    return offsets


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("text", [TYPED, "Hello", "<|im_end|>", "\U0001f600\U0001f600"])
def test_tokens_are_found_at_their_offsets(
    tokenizer: Tokenizer, text: str, is_text: bool, skips: bool
) -> None:
    token_ids = tokenizer.encode(text)
    echoed = text if is_text else tokenizer.decode(token_ids, skips)
    offsets = offsets_of(EchoedPrompt(tokenizer, echoed, token_ids, is_text, skips), token_ids)
    for begin, end, token_id in zip(offsets, [*offsets[1:], len(echoed)], token_ids, strict=True):
        shown = tokenizer.decode([token_id], skips and not is_text)
        if "\ufffd" not in shown:
            assert echoed[begin:end] == shown
        else:
            assert echoed[begin : begin + 1] in "\u00e9\U0001f600"


def test_a_token_that_the_tokenizer_put_before_a_text_has_no_room(tokenizer: Tokenizer) -> None:
    without, token_ids = tokenizer.encode(TYPED), (BEGIN, *tokenizer.encode(TYPED))
    offsets = offsets_of(EchoedPrompt(tokenizer, TYPED, token_ids, True, True), token_ids)
    assert offsets == [0, *offsets_of(EchoedPrompt(tokenizer, TYPED, without, True, True), without)]


def test_a_token_after_bytes_that_form_no_character_begins_behind_them(tokenizer: Tokenizer) -> None:
    (byte,) = (token_id for token_id in range(300) if tokenizer.token_bytes(token_id) == b"\xe2")
    token_ids = (*tokenizer.encode("a"), byte, byte, *tokenizer.encode("ab\u00e9"))
    text = tokenizer.decode(token_ids, True)
    assert text == "a\ufffd\ufffdab\u00e9"
    offsets = [0, 1, 1, 3, 4, 5, 5]
    assert offsets_of(EchoedPrompt(tokenizer, text, token_ids, False, True), token_ids) == offsets
    writer = CompletionLogprobsStream(CompletionTokens(tokenizer), True, ())
    columns = LogprobColumns([TokenLogprobs(token_id, -1.0, 1, ()) for token_id in token_ids])
    assert json.loads("".join(writer.write(columns)))["text_offset"] == offsets


def test_a_space_that_the_tokenizer_put_before_a_text_has_no_room() -> None:
    words = {"<s>": 0, "\u2581the": 1, "\u2581cache": 2}
    backend = RustTokenizer(models.WordLevel(words, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])

    class Words:
        def __init__(self) -> None:
            self.backend, self.token_bytes = backend, TokenBytes(backend).of

        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
            return str(backend.decode([*token_ids], skip_special_tokens=skip_special_tokens))

    words_only: Any = Words()
    assert offsets_of(EchoedPrompt(words_only, "the cache", (0, 1, 2), True, True), (0, 1, 2)) == [0, 0, 3]


def test_offsets_stay_within_a_text_that_is_shorter_than_its_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("the cache the cache")
    offsets = offsets_of(EchoedPrompt(tokenizer, "the", token_ids, True, True), token_ids)
    assert offsets == sorted(offsets)
    assert offsets[-1] == 3


def answer_of(token_ids: Sequence[int], tokenizer: Tokenizer, num_top: int) -> list[Delta]:
    """One token in each delta; the first one has none of the prompt's log-probabilities yet."""
    deltas = [
        Delta(
            (token_id,), tokenizer.decode([token_id], True), (TokenLogprobs(token_id, -1.0, 1, ((9, -2.0),)),)
        )
        for token_id in token_ids
    ]
    return [*deltas, Delta(finish=finish_of(FinishReason.STOP))]


def with_prompt_logprobs(deltas: Sequence[Delta], prompt: Sequence[int], num_top: int) -> list[Delta]:
    """The deltas as they come if the prompt's log-probabilities come with the first one."""
    first = Delta(
        deltas[0].token_ids,
        deltas[0].text,
        deltas[0].logprobs,
        deltas[0].finish,
        prompt_logprobs_of(prompt, num_top),
    )
    return [*prompt_parts(first), *deltas[1:]]


def writer_of(
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    is_only_echo: bool = False,
    has_field: bool = False,
) -> CompletionAnswer:
    tokens = CompletionTokens(tokenizer)
    texts = [tokenizer.decode(prompt, True) for prompt in prompts]
    logprobs = [
        CompletionLogprobsStream(tokens, True, prompt, EchoedPrompt(tokenizer, text, prompt, False, True))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    count = UsageCount(sum(map(len, prompts)), num_samples=1)
    field = RankedTokens(tokenizer) if has_field else None
    return CompletionAnswer(
        HEAD, count, None, texts, logprobs, field, is_echo=True, is_only_echo=is_only_echo
    )


def expected_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[TokenLogprobs], num_top: int
) -> CompletionLogprobs:
    def name(token_id: int) -> str:
        return token_name(tokenizer.token_bytes(token_id))

    positions = [*prompt_logprobs_of(prompt, num_top), *answer]
    token_ids = [prompt[0], *(position.token_id for position in positions)]
    before = [tokenizer.decode(token_ids[:number], True) for number in range(len(token_ids))]
    return CompletionLogprobs(
        list(map(name, token_ids)),
        [None, *(position.logprob for position in positions)],
        [None, *(top_of(tokenizer, each) for each in positions)],
        list(map(len, before)),
    )


def expected_field(tokenizer: Tokenizer, prompt: Sequence[int], num_top: int) -> PromptLogprobs:
    def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        name = tokenizer.token_bytes(token_id).decode(errors="replace")
        return PromptLogprob(max(logprob, MIN_LOGPROB), rank, name)

    return [
        None,
        *(
            {str(each.token_id): entry(each.token_id, each.logprob, each.rank)}
            | {
                str(token_id): entry(token_id, logprob, rank)
                for rank, (token_id, logprob) in enumerate(each.top, 1)
                if token_id != each.token_id
            }
            for each in prompt_logprobs_of(prompt, num_top)
        ),
    ]


def prompts_of(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    the = tokenizer.encode("the cache ")
    return [the[:1], the, the * PORTION_TOKENS]


@pytest.mark.parametrize("has_field", [False, True])
@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_a_whole_answer_begins_with_the_prompts_tokens(
    tokenizer: Tokenizer, num_top: int, has_field: bool
) -> None:
    prompts, answer_ids = prompts_of(tokenizer), tokenizer.encode(" the baton")
    deltas = answer_of(answer_ids, tokenizer, num_top)
    writer = writer_of(tokenizer, prompts, has_field=has_field)
    for index, prompt in enumerate(prompts):
        for delta in with_prompt_logprobs(deltas, prompt, num_top):
            writer.on_delta(index, delta)
    pieces = list(writer.whole())
    positions = [position for delta in deltas for position in delta.logprobs]
    choices = [
        CompletionChoice(
            index,
            tokenizer.decode(prompt, True) + " the baton",
            expected_logprobs(tokenizer, prompt, positions, num_top),
            "stop",
            None,
            expected_field(tokenizer, prompt, num_top) if has_field else None,
        )
        for index, prompt in enumerate(prompts)
    ]
    num_prompt_tokens, num_tokens = sum(map(len, prompts)), len(prompts) * len(answer_ids)
    usage = Usage(
        num_prompt_tokens, num_tokens, num_prompt_tokens + num_tokens, PromptTokensDetails(3 * len(prompts))
    )
    expected = Completion(HEAD.id, "text_completion", HEAD.created, HEAD.model, choices, usage)
    assert "".join(pieces).encode() == TypeAdapter(Completion).dump_json(expected)
    assert max(map(len, pieces)) < MAX_PIECE


def events_of(writer: CompletionAnswer, index: int, delta: Delta) -> list[dict[str, Any]]:
    events = writer.piece(index, delta).decode("ascii").split("\n\n")
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events if event]


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_a_stream_begins_with_the_prompts_tokens(tokenizer: Tokenizer, num_top: int) -> None:
    prompts, answer_ids = prompts_of(tokenizer), tokenizer.encode(" the baton")
    deltas = answer_of(answer_ids, tokenizer, num_top)
    positions = [position for delta in deltas for position in delta.logprobs]
    writer = writer_of(tokenizer, prompts)
    assert writer.opening() == b"", "the prompt comes with its log-probabilities"
    for index, prompt in enumerate(prompts):
        parts = with_prompt_logprobs(deltas, prompt, num_top)
        events = [event for part in parts for event in events_of(writer, index, part)]
        assert len(events) == len(parts)
        assert {event["index"] for event in events} == {index}
        assert events[0]["text"].startswith(tokenizer.decode(prompt, True))
        assert "".join(event["text"] for event in events) == tokenizer.decode((*prompt, *answer_ids), True)
        expected = TypeAdapter(CompletionLogprobs).dump_python(
            expected_logprobs(tokenizer, prompt, positions, num_top)
        )
        for name, values in expected.items():
            assert [value for event in events for value in event["logprobs"][name]] == values
        assert max(len(event["logprobs"]["tokens"]) for event in events) <= PORTION_TOKENS + 2


def test_of_an_answer_without_tokens_only_its_prompt_is_seen(tokenizer: Tokenizer) -> None:
    prompts = prompts_of(tokenizer)[1:]
    deltas = answer_of(tokenizer.encode("x"), tokenizer, 1)
    whole, stream = (writer_of(tokenizer, prompts, is_only_echo=True) for _ in range(2))
    for index, prompt in enumerate(prompts):
        logprobs = expected_logprobs(tokenizer, prompt, (), 1)
        events = []
        for part in with_prompt_logprobs(deltas, prompt, 1):
            whole.on_delta(index, part)
            events += events_of(stream, index, part)
        assert "".join(event["text"] for event in events) == tokenizer.decode(prompt, True)
        assert [token for event in events for token in event["logprobs"]["tokens"]] == logprobs.tokens
        assert [event["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    answer = TypeAdapter(Completion).validate_json("".join(whole.whole()))
    assert answer.usage.completion_tokens == 0
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        assert choice.text == tokenizer.decode(prompt, True)
        assert choice.logprobs == expected_logprobs(tokenizer, prompt, (), 1)
        assert choice.finish_reason == "length"


def test_a_chat_has_its_prompts_log_probabilities_once(tokenizer: Tokenizer) -> None:
    prompt = prompts_of(tokenizer)[-1]
    count = UsageCount(len(prompt), num_samples=2)
    writer = ChatAnswer(HEAD, count, None, None, [None, None], RankedTokens(tokenizer))
    for index in range(2):
        for delta in with_prompt_logprobs([Delta((5,), "a", (), finish_of())], prompt, 3):
            writer.on_delta(index, delta)
    pieces = list(writer.whole())
    choices = [ChatChoice(index, ChatMessageAnswer("assistant", "a"), None, "length") for index in range(2)]
    usage = Usage(len(prompt), 2, len(prompt) + 2, PromptTokensDetails(3))
    expected = ChatCompletion(
        *(HEAD.id, "chat.completion", HEAD.created, HEAD.model, choices, usage),
        expected_field(tokenizer, prompt, 3),
    )
    assert "".join(pieces).encode() == TypeAdapter(ChatCompletion).dump_json(expected)
    assert max(map(len, pieces)) < MAX_PIECE
