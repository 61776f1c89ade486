"""Completions of texts, and log-probabilities of both APIs, as the unmodified `openai` package sees them."""

import math
from pathlib import Path
from typing import Any

import pytest

from baton.request import EngineRequest, RequestOutput, TokenLogprobs
from tests.factories.gateway import answering, outputs_of
from tests.factories.models import make_tokenizer
from tests.factories.openai import openai_with

TOKENIZER = make_tokenizer()
TEXT = "Caf\u00e9 \U0001f600 the"
ANSWER = TOKENIZER.encode(TEXT).ids
THE = TOKENIZER.encode("the").ids
PROMPT = TOKENIZER.encode("Hello").ids


def with_logprobs(request: EngineRequest) -> list[RequestOutput]:
    """The answer with log-probabilities. Token 65 is likelier than the answer's own token, and token 66 is
    impossible."""
    return [
        RequestOutput(
            request_id=output.request_id,
            first_position=output.first_position,
            token_ids=output.token_ids,
            logprobs=(TokenLogprobs(output.token_ids[0], -1.5, 2, ((65, -0.25), (66, -math.inf))),),
            finish_reason=output.finish_reason,
        )
        for output in outputs_of(request, ANSWER)
    ]


async def test_a_text_is_continued(folder: Path) -> None:
    async with openai_with(folder, answering(ANSWER)) as (under_test, client):
        answer = await client.completions.create(model="tiny", prompt="Hello")
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "length", None)
        request = await under_test.workers["d0"].next_request()
        assert list(request.prompt_token_ids) == PROMPT
        assert request.sampling_params.max_tokens == 16, "OpenAI's default"
        stream = await client.completions.create(model="tiny", prompt="Hello", stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
        assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "echoes"),
    [
        ("Hello", ["Hello"]),
        (PROMPT, ["Hello"]),
        (["Hello", "the"], ["Hello", "the"]),
        ([PROMPT, THE], ["Hello", "the"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_of_every_kind_get_n_answers_each_in_their_order(
    folder: Path, prompt: Any, echoes: list[str], stream: bool
) -> None:
    async with openai_with(folder, answering(ANSWER)) as (under_test, client):
        every_chunk: Any = {"include_usage": True, "continuous_usage_stats": True}
        options: dict[str, Any] = {"stream_options": every_chunk} if stream else {}
        answer: Any = await client.completions.create(
            model="tiny", prompt=prompt, n=2, echo=True, best_of=2, stream=stream, **options
        )
        texts = [""] * (2 * len(echoes))
        chunks = [chunk async for chunk in answer] if stream else [answer]
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [echo + TEXT for echo in echoes for _ in range(2)]
        requests = [await under_test.workers["d0"].next_request() for _ in texts]
        assert len({request.request_id for request in requests}) == len(texts)
        usage = chunks[-1].usage
        assert {chunk.usage.prompt_tokens for chunk in chunks} == {usage.prompt_tokens}
        assert usage.prompt_tokens == sum(len(TOKENIZER.encode(echo).ids) for echo in echoes)
        assert usage.completion_tokens == len(texts) * len(ANSWER)


def cached(request: EngineRequest) -> list[RequestOutput]:
    """The answer to a prompt. All but one of the prompt's tokens were in a prefix cache."""
    outputs = outputs_of(request, ANSWER)
    for output in outputs:
        output.num_cached_tokens = len(request.prompt_token_ids) - 1
    return outputs


async def test_usage_has_the_cached_tokens_of_each_prompt(folder: Path) -> None:
    async with openai_with(folder, cached) as (_, client):
        answer = await client.completions.create(model="tiny", prompt=[[5] * 9, [6] * 5], n=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 14
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 8 + 4, "a prompt counts once"


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_text_say_where_each_token_begins(folder: Path, stream: bool) -> None:
    async with openai_with(folder, with_logprobs) as (under_test, client):
        answer: Any = await client.completions.create(model="tiny", prompt="Hello", logprobs=2, stream=stream)
        chunks = [chunk async for chunk in answer] if stream else [answer]
        parts = [chunk.choices[0].logprobs for chunk in chunks]
        tokens = [token for part in parts for token in part.tokens]
        offsets = [offset for part in parts for offset in part.text_offset]
        assert len(tokens) == len(offsets) == len(ANSWER)
        assert {logprob for part in parts for logprob in part.token_logprobs} == {-1.5}
        for token, offset in zip(tokens, offsets, strict=True):
            if not token.startswith("bytes:"):
                assert TEXT[offset:].startswith(token)
        assert [token for token in tokens if token.startswith("bytes:")][-4:] == [
            "bytes:\\xf0",
            "bytes:\\x9f",
            "bytes:\\x98",
            "bytes:\\x80",
        ]
        assert {offset for token, offset in zip(tokens, offsets, strict=True) if token == "bytes:\\x9f"} == {
            5
        }
        tops = [top for part in parts for top in part.top_logprobs]
        likeliest = {TOKENIZER.decode([65]): -0.25, TOKENIZER.decode([66]): -9999.0}
        assert tops == [likeliest | {token: -1.5} for token in tokens], "the token itself is one of them"
        request = await under_test.workers["d0"].next_request()
        assert request.sampling_params.logprobs == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_conversation_have_their_bytes(folder: Path, stream: bool) -> None:
    async with openai_with(folder, with_logprobs) as (under_test, client):
        answer: Any = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            logprobs=True,
            top_logprobs=2,
            stream=stream,
        )
        chunks = [chunk async for chunk in answer][1:] if stream else [answer]
        content = [token for chunk in chunks for token in chunk.choices[0].logprobs.content]
        assert bytes(byte for token in content for byte in token.bytes).decode() == TEXT
        assert {token.logprob for token in content} == {-1.5}
        assert content[0].token == "C"
        for token in content:
            assert [top.logprob for top in token.top_logprobs] == [-0.25, -9999.0]
        request = await under_test.workers["d0"].next_request()
        assert request.sampling_params.logprobs == 2
