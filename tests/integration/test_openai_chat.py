"""Chat completions as the unmodified `openai` package sees them, and what workers receive."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, TypeAdapter

from baton.request import FinishReason
from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from gateway.conversation import with_limited_spaces
from gateway.http.openai.answers import ChatCompletionChunk
from tests.factories.gateway import (
    answering,
    gateway_with,
    outputs_of,
    silent,
)
from tests.factories.models import make_tokenizer
from tests.factories.openai import openai_with, raw_events

TOKENIZER = make_tokenizer()
ANSWER = TOKENIZER.encode("The cache is the baton").ids
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


async def test_a_whole_answer(folder: Path) -> None:
    async with openai_with(folder, answering(ANSWER), answering(ANSWER)) as (under_test, client):
        answer = await client.chat.completions.create(model="tiny", messages=HELLO)
        (choice,) = answer.choices
        assert choice.message.role == "assistant"
        assert choice.message.content == "The cache is the baton"
        assert (choice.finish_reason, choice.logprobs) == ("length", None)
        request = await under_test.workers["d0"].next_request()
        prompt = TOKENIZER.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n").ids
        assert list(request.prompt_token_ids) == prompt
        assert request.sampling_params.temperature == 1.0
        assert request.sampling_params.max_tokens == 256 - len(prompt), "all that the prompt leaves room for"
        assert answer.usage is not None
        usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
        assert usage == (len(prompt), len(ANSWER), len(prompt) + len(ANSWER))
        assert answer.id == f"chatcmpl-{answer._request_id}"


async def test_a_conversation_goes_on_with_the_answer_as_it_came(folder: Path) -> None:
    """The answer keeps its empty fields. Texts in pieces are one text, a developer's turn counts as the
    system's, and messages may have a type."""

    async with openai_with(folder, answering(ANSWER)) as (under_test, client):
        messages: list[Any] = [
            {"role": "developer", "content": "Be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],
            },
        ]
        answer = await client.chat.completions.create(model="tiny", messages=messages)
        said, more = answer.choices[0].message.model_dump(), {"role": "user", "content": "More"}
        messages += [said | {"type": "text"}, more | {"type": "text"}]
        await client.chat.completions.create(model="tiny", messages=messages)
        await under_test.workers["d0"].next_request()
        request = await under_test.workers["d0"].next_request()
        turns = [
            ("system", "Be brief"),
            ("user", "Hello"),
            ("assistant", "The cache is the baton"),
            ("user", "More"),
        ]
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        assert list(request.prompt_token_ids) == TOKENIZER.encode(text + "<|im_start|>assistant\n").ids


async def test_an_answer_streams_piece_by_piece(folder: Path) -> None:
    async with openai_with(folder, answering(ANSWER), answering(ANSWER)) as (_, client):
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        chunks = [chunk async for chunk in stream]
        first, *middle, last = [chunk.choices[0] for chunk in chunks]
        assert (first.delta.role, first.delta.content) == ("assistant", "")
        assert all(choice.delta.role is None and choice.finish_reason is None for choice in middle)
        assert last.finish_reason == "length"
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(texts) == "The cache is the baton"
        assert len({chunk.id for chunk in chunks}) == 1
        assert all(chunk.usage is None for chunk in chunks)


async def test_events_are_what_the_description_says(folder: Path) -> None:
    """Written by hand for speed, they still have every key; the last is [DONE]; all of it is ASCII."""

    answer = TOKENIZER.encode('"é\n\u2028\U0001f600').ids
    async with gateway_with(folder, {}, {"d0": answering(answer)}) as under_test:
        *events, last = await raw_events(under_test, HELLO, n=2, max_tokens=20)
        assert last == "[DONE]"
        assert all(event.isascii() for event in events)
        chunks = [json.loads(event) for event in events]
        for event in events:
            TypeAdapter(ChatCompletionChunk).validate_json(event, strict=True, extra="forbid")
        assert not any("usage" in chunk for chunk in chunks)
        for index in (0, 1):
            choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert choices[0]["delta"]["role"] == "assistant"
            assert "".join(choice["delta"]["content"] for choice in choices) == '"é\n\u2028\U0001f600'
            assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "length"]


async def test_usage_comes_if_it_is_asked_for(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test:
        *events, last, done = await raw_events(under_test, HELLO, stream_options={"include_usage": True})
        assert done == "[DONE]"
        assert {json.loads(event)["usage"] for event in events} == {None}
        total = json.loads(last)
        assert total["choices"] == []
        assert total["usage"]["completion_tokens"] == len(ANSWER)
        options = {"include_usage": True, "continuous_usage_stats": True}
        *events, last, done = await raw_events(under_test, HELLO, stream_options=options)
        counts = [json.loads(event)["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, len(ANSWER))


async def test_many_answers_have_seeds_of_their_own(folder: Path) -> None:
    async with openai_with(folder, answering(ANSWER)) as (under_test, client):

        async def seeds(**options: Any) -> list[int]:
            answer = await client.chat.completions.create(model="tiny", messages=HELLO, **options)
            assert [choice.index for choice in answer.choices] == list(range(options["n"]))
            assert answer.usage is not None
            assert answer.usage.completion_tokens == options["n"] * len(ANSWER)
            requests = [await under_test.workers["d0"].next_request() for _ in answer.choices]
            assert answer.usage.prompt_tokens == len(requests[0].prompt_token_ids)
            return sorted(request.sampling_params.seed or 0 for request in requests)

        three = await seeds(n=3, seed=7)
        assert len(set(three)) == 3
        assert await seeds(n=3, seed=7) == three
        assert await seeds(n=1, seed=7) == [7]
        assert 7 in three
        assert len(set(await seeds(n=2))) == 2


async def test_every_sampling_field_reaches_the_workers(folder: Path) -> None:
    async with openai_with(folder, answering(ANSWER)) as (under_test, client):
        await client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_completion_tokens=20,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=1,
            frequency_penalty=-0.5,
            logit_bias={"17": -100},
            seed=11,
            stop=["zzz", "yyy"],
            logprobs=True,
            top_logprobs=2,
            user="somebody",
            store=False,
            service_tier="auto",
            extra_body={
                "top_k": 40,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
                "min_tokens": 2,
                "ignore_eos": True,
                "stop_token_ids": [5],
                "cache_salt": "mine",
                "priority": -3,
                "skip_reading_prefix_cache": True,
                "max_model_len": 100,
            },
        )
        request = await under_test.workers["d0"].next_request()
        assert request.sampling_params == SamplingParams(
            max_tokens=20,
            min_tokens=2,
            temperature=0.5,
            top_k=40,
            top_p=0.9,
            min_p=0.1,
            presence_penalty=1.0,
            frequency_penalty=-0.5,
            repetition_penalty=1.1,
            logit_bias={17: -100.0},
            seed=11,
            logprobs=2,
            stop=("zzz", "yyy"),
            stop_token_ids=(5,),
            ignore_eos=True,
        )
        assert (request.cache_salt, request.priority) == ("mine", -3)
        assert request.skip_reading_prefix_cache


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CLOSED = json.dumps(SCHEMA | {"additionalProperties": False}, separators=(",", ":"))
"""Further properties are forbidden, since the schema does not allow them."""


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            StructuredOutput(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            StructuredOutput(GrammarKind.JSON_SCHEMA, CLOSED),
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput(GrammarKind.REGEX, "a+")),
        (
            {"structured_outputs": {"json": SCHEMA}},
            StructuredOutput(GrammarKind.JSON_SCHEMA, CLOSED),
        ),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            StructuredOutput(GrammarKind.LARK, 'start: "a"'),
        ),
    ],
)
async def test_answers_that_must_match_something(
    folder: Path, fields: dict[str, Any], output: StructuredOutput | None
) -> None:
    async with gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test:
        await raw_events(under_test, HELLO, **fields)
        request = await under_test.workers["d0"].next_request()
        assert request.sampling_params.structured_output == (output and with_limited_spaces(output))


async def test_stop_strings_end_an_answer(folder: Path) -> None:
    async with openai_with(folder, answering(ANSWER)) as (_, client):
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, stop="the")
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == ("The cache is ", "stop")
        assert choice.model_extra == {"stop_reason": "the"}


async def test_a_routing_mode_can_be_asked_for(folder: Path) -> None:
    async with gateway_with(folder, {"p0": answering(ANSWER)}, {"d0": answering(ANSWER)}) as under_test:
        await raw_events(under_test, HELLO, routing_mode="local")
        request = await under_test.workers["d0"].next_request()
        assert request.kv_transfer is None
        await raw_events(under_test, HELLO, routing_mode="disaggregated")
        request = await under_test.workers["d0"].next_request()
        assert request.kv_transfer is not None


class City(BaseModel):
    name: str


async def test_the_packages_own_helpers_work_too(folder: Path) -> None:
    """One adds up a stream's chunks. The other turns a class into a schema, and the answer into its instance."""

    answer = TOKENIZER.encode('{"name": "Paris"}').ids
    stops = partial(outputs_of, token_ids=answer, finish=FinishReason.STOP)
    async with openai_with(folder, stops) as (_, client):
        async with client.chat.completions.stream(model="tiny", messages=HELLO) as stream:
            whole = await stream.get_final_completion()
        assert whole.choices[0].message.content == '{"name": "Paris"}'
        parsed = await client.chat.completions.parse(model="tiny", messages=HELLO, response_format=City)
        assert parsed.choices[0].message.parsed == City(name="Paris")


@pytest.mark.in_order
async def test_available_parts_of_several_answers_are_sent_together(folder: Path) -> None:
    """Each part is an event of its own. One chunk of the body holds all parts that were written at once."""

    async with gateway_with(folder, {}, {"d0": silent}) as under_test:
        d0 = under_test.workers["d0"]
        reader, writer = await asyncio.open_connection("127.0.0.1", under_test.gateway.http_port)
        body = json.dumps({"model": "tiny", "messages": HELLO, "n": 4, "stream": True}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        requests = [await d0.next_request() for _ in range(4)]
        for start, finish, num_events in ((0, None, 8), (1, None, 4), (2, FinishReason.STOP, 4)):
            news = [outputs_of(request, [ANSWER[0]], start, finish) for request in requests]
            d0.say(requests[0], [output for each in news for output in each])
            if start == 0:
                await reader.readuntil(b"\r\n\r\n")
            size = int(await reader.readline(), 16)
            chunk = await reader.readexactly(size + len(b"\r\n"))
            assert chunk.count(b"data: ") == num_events
        writer.close()
