"""Tools and reasoning of chat completions, as the `openai` package and plain HTTP clients see them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel, TypeAdapter

from baton.request import EngineRequest, FinishReason, RequestOutput, TokenLogprobs
from gateway.http.openai.answers import ChatCompletion, ChatCompletionChunk
from tests.factories.answer_format import MarkedFormat
from tests.factories.conversations import HARMONY, TEMPLATES
from tests.factories.gateway import GatewayUnderTest, answering, gateway_with
from tests.factories.models import make_tokenizer, make_tokenizer_dir
from tests.factories.openai import openai_for, openai_with, raw_events

TOKENIZER = make_tokenizer()
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
PARIS, ROME = '{"city": "Paris \U0001f5fc\\n"}', '{"city": "Rome"}'
CALLS = f"<call get_weather>{PARIS}</call><call get_weather>{ROME}</call>"
TALKATIVE = f"<think>hm, é</think>I look < it up.{CALLS}"


class Weather(BaseModel):
    """The weather of a city"""

    city: str


TOOLS = [pydantic_function_tool(Weather, name="get_weather")]


@asynccontextmanager
async def model_says(
    folder: Path, text: str, finish: FinishReason = FinishReason.STOP, **config: Any
) -> AsyncIterator[tuple[GatewayUnderTest, AsyncOpenAI]]:
    script = answering(TOKENIZER.encode(text).ids, finish)
    config = {"max_model_len": 2000} | config
    async with openai_with(folder, script, script, answer_format=MarkedFormat(), **config) as pair:
        yield pair


async def whole(client: AsyncOpenAI, **fields: Any) -> Any:
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", **{"messages": HELLO, "tools": TOOLS} | fields
    )
    TypeAdapter(ChatCompletion).validate_json(raw.content, strict=True, extra="forbid")
    return raw.parse()


async def test_a_whole_answer_has_reasoning_text_and_calls(folder: Path) -> None:
    async with model_says(folder, TALKATIVE) as (_, client):
        (choice,) = (await whole(client)).choices
        message = choice.message
        assert choice.finish_reason == "tool_calls"
        assert (message.role, message.content) == ("assistant", "I look < it up.")
        assert (message.reasoning_content, message.reasoning) == ("hm, é", "hm, é")
        calls = [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls]
        assert calls == [("function", "get_weather", PARIS), ("function", "get_weather", ROME)]
        ids = [call.id for call in message.tool_calls]
        assert len(set(ids)) == 2
        assert all(len(id_) == 29 and id_.startswith("call_") for id_ in ids)


async def test_content_is_null_beside_nothing_but_calls(folder: Path) -> None:
    async with model_says(folder, CALLS) as (_, client):
        (choice,) = (await whole(client)).choices
        assert choice.message.content is None
        assert "reasoning" not in choice.message.model_extra


async def test_an_answer_without_calls_is_as_ever(folder: Path) -> None:
    async with model_says(folder, "No idea.") as (_, client):
        (choice,) = (await whole(client)).choices
        assert (choice.message.content, choice.message.tool_calls) == ("No idea.", None)
        assert choice.finish_reason == "stop"
    async with model_says(folder, "<think></think>") as (_, client):
        assert (await whole(client)).choices[0].message.content == ""


async def test_a_stream_joins_to_the_whole_answer(folder: Path) -> None:
    """The package accumulates the stream, and parses the arguments."""
    async with model_says(folder, TALKATIVE) as (_, client):
        answer = (await whole(client, extra_body={"request_id": "r"})).choices[0]
        async with client.chat.completions.stream(
            model="tiny", messages=HELLO, tools=TOOLS, extra_body={"request_id": "r"}
        ) as stream:
            kinds = [event.type async for event in stream]
            final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.content == answer.message.content
        assert (final.message.model_extra or {})["reasoning"] == answer.message.reasoning
        assert final.message.tool_calls is not None
        for streamed, call in zip(final.message.tool_calls, answer.message.tool_calls, strict=True):
            assert streamed.function.arguments == call.function.arguments
            assert streamed.id != call.id, "the next turn of a conversation may have the same request_id"
            assert isinstance(streamed.function.parsed_arguments, Weather)
        assert kinds.count("tool_calls.function.arguments.done") == 2
        parsed = await client.chat.completions.parse(model="tiny", messages=HELLO, tools=TOOLS)
        calls = parsed.choices[0].message.tool_calls
        assert calls is not None
        assert calls[0].function.parsed_arguments == Weather(city="Paris \U0001f5fc\n")


async def test_a_calls_first_event_names_it_and_later_ones_have_its_arguments(folder: Path) -> None:
    async with model_says(folder, f"Well.{CALLS}") as (under_test, _):
        *events, done = await raw_events(under_test, HELLO, tools=TOOLS, request_id="r")
        assert done == "[DONE]"
        for event in events:
            assert event.isascii()
            TypeAdapter(ChatCompletionChunk).validate_json(event, strict=True, extra="forbid")
        choices = [json.loads(event)["choices"][0] for event in events]
        assert choices[0]["delta"] == {"role": "assistant", "content": None}
        assert choices[-1] == {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": "tool_calls",
            "stop_reason": None,
        }
        pieces = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        begins = [piece for piece in pieces if "id" in piece]
        assert len({piece["id"] for piece in begins}) == 2
        assert begins == [
            {
                "index": index,
                "id": begins[index]["id"],
                "type": "function",
                "function": {"name": "get_weather", "arguments": ""},
            }
            for index in (0, 1)
        ]
        for index, arguments in enumerate((PARIS, ROME)):
            of_call = [piece for piece in pieces if piece["index"] == index]
            assert of_call[0] is not of_call[-1]
            assert all(set(piece) == {"index", "function"} for piece in of_call[1:])
            assert "".join(piece["function"]["arguments"] for piece in of_call) == arguments


async def test_several_answers_have_calls_of_their_own(folder: Path) -> None:
    async with model_says(folder, TALKATIVE) as (under_test, client):
        answers = (await whole(client, n=3)).choices
        assert len({call.id for choice in answers for call in choice.message.tool_calls}) == 6
        *events, _ = await raw_events(under_test, HELLO, tools=TOOLS, n=3)
        arguments = ["", "", ""]
        for event in events:
            (choice,) = json.loads(event)["choices"]
            for call in choice["delta"].get("tool_calls", ()):
                arguments[choice["index"]] += call["function"]["arguments"]
        assert arguments == [PARIS + ROME] * 3


async def test_a_call_that_is_cut_off_is_no_finished_call(folder: Path) -> None:
    cut = CALLS[: -len('me"}</call>')]
    async with model_says(folder, cut, FinishReason.LENGTH) as (_, client):
        (choice,) = (await whole(client)).choices
        assert choice.finish_reason == "length"
        assert choice.message.tool_calls[1].function.arguments == ROME[:-4]
    async with model_says(folder, cut) as (under_test, client):
        assert (await whole(client)).choices[0].finish_reason == "stop"
        *_, last, _ = await raw_events(under_test, HELLO, tools=TOOLS)
        assert json.loads(last)["choices"][0]["finish_reason"] == "stop"


async def test_reasoning_can_be_left_out(folder: Path) -> None:
    async with model_says(folder, TALKATIVE) as (under_test, client):
        answer = await whole(client, extra_body={"include_reasoning": False})
        assert answer.choices[0].message.content == "I look < it up."
        assert "reasoning" not in answer.choices[0].message.model_extra
        events = await raw_events(under_test, HELLO, include_reasoning=False)
        assert not any("reasoning" in event for event in events)
        assert answer.usage.completion_tokens == len(TOKENIZER.encode(TALKATIVE).ids)
        assert answer.usage.completion_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("extra", [{}, {"skip_special_tokens": False}, {"include_reasoning": False}])
async def test_usage_counts_the_tokens_of_reasoning(folder: Path, extra: dict[str, Any]) -> None:
    """The count is the sum over all answers, whole and streamed. It is 0 if the model does not reason."""
    expected = len(TOKENIZER.encode("<think>hm, é</think>").ids)
    async with model_says(folder, TALKATIVE) as (under_test, client):
        for n in (1, 3):
            whole_usage = (await whole(client, n=n, extra_body=extra)).usage
            details = whole_usage.completion_tokens_details
            assert n * (expected - 1) <= details.reasoning_tokens <= n * expected
            asked = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            *events, last, _ = await raw_events(under_test, HELLO, n=n, **asked, **extra)
            counts = [
                json.loads(event)["usage"]["completion_tokens_details"]["reasoning_tokens"]
                for event in events
                if json.loads(event)["usage"] is not None
            ]
            assert counts == sorted(counts)
            assert counts[-1] == details.reasoning_tokens
            assert json.loads(last)["usage"]["completion_tokens_details"] == details.to_dict()
    async with model_says(folder, "No idea.") as (_, client):
        assert (await whole(client)).usage.completion_tokens_details.reasoning_tokens == 0
        completion = await client.completions.create(model="tiny", prompt="Hello")
        assert completion.usage is not None
        assert "completion_tokens_details" not in completion.usage.to_dict()


async def test_reasoning_without_tools_streams_beside_text(folder: Path) -> None:
    async with model_says(folder, "<think>one two</think>three") as (under_test, _):
        *events, _ = await raw_events(under_test, HELLO)
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "one two"
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "one two"
        assert "".join(delta.get("content") or "" for delta in deltas) == "three"


async def test_the_conversation_goes_on_with_the_calls_results(folder: Path) -> None:
    """The answer is sent back as it came, and the template gets calls, results and reasoning."""
    async with model_says(folder, TALKATIVE) as (under_test, client):
        message = (await whole(client)).choices[0].message
        results = [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "type": "text",
                "content": [{"type": "text", "text": f"sun {number}"}],
            }
            for number, call in enumerate(message.tool_calls)
        ]
        hello, said = HELLO[0] | {"name": "bob"}, message.model_dump() | {"name": "amy", "annotations": []}
        await whole(client, messages=[hello, said, *results])
        for _ in range(2):
            request = await under_test.workers["d0"].next_request()
        prompt = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
        turns = [
            ("user bob", "Hello"),
            ("assistant amy", TALKATIVE),
            ("tool get_weather", "sun 0"),
            ("tool get_weather", "sun 1"),
        ]
        assert prompt.endswith(
            "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
            + "<|im_start|>assistant\n"
        )
        assert prompt.startswith("<|im_start|>system\ntools: get_weather{")


async def test_the_conversation_goes_on_with_what_the_packages_helpers_read(folder: Path) -> None:
    """They add the parsed text and the parsed arguments to the message."""
    async with model_says(folder, CALLS) as (under_test, client):
        asked: Any = {"model": "tiny", "messages": HELLO, "tools": TOOLS}
        async with client.chat.completions.stream(**asked) as stream:
            streamed = await stream.get_final_completion()
        for completion in (await client.chat.completions.parse(**asked), streamed):
            message = completion.choices[0].message
            assert message.tool_calls is not None
            assert message.tool_calls[0].function.parsed_arguments == Weather(city="Paris \U0001f5fc\n")
            results: list[Any] = [
                {"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls
            ]
            await client.chat.completions.create(**asked | {"messages": [*HELLO, message, *results]})
        for _ in range(4):
            request = await under_test.workers["d0"].next_request()
    prompt = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    assert f"<|im_start|>assistant\n{CALLS}<|im_end|>\n<|im_start|>tool get_weather\nsun" in prompt


async def test_an_answer_as_litellm_sends_it_back(folder: Path) -> None:
    """LiteLLM puts the fields of a message that it does not know into one field."""
    async with model_says(folder, TALKATIVE) as (_, client):
        message = (await whole(client)).choices[0].message.model_dump()
        fields = {"provider_specific_fields": {"reasoning": message.pop("reasoning")}}
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "sun"} for call in message["tool_calls"]
        ]
        await whole(client, messages=[*HELLO, message | fields, *results])


async def test_an_answer_as_the_agents_sdk_for_javascript_sends_it_back(folder: Path) -> None:
    """The text is a part, with copies of the message's other fields."""
    async with model_says(folder, TALKATIVE) as (under_test, client):
        copied = (await whole(client)).choices[0].message.to_dict()
        part = {"type": "text", "text": copied.pop("content")} | copied
        streamed = {"type": "text", "text": "Fine", "annotations": []}
        assert {"role", "refusal", "reasoning", "reasoning_content", "tool_calls"} < part.keys()
        turns = [{"role": "assistant", "content": [each]} for each in (part, streamed)]
        await whole(client, messages=[*HELLO, *turns, *HELLO])
        for _ in range(2):
            request = await under_test.workers["d0"].next_request()
    prompt = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    assert (
        "<|im_start|>assistant\nI look < it up.<|im_end|>\n<|im_start|>assistant\nFine<|im_end|>\n" in prompt
    )


@pytest.mark.parametrize("text", ["<think>All the time", "<call "])
async def test_a_stream_without_text_and_calls_has_an_empty_content(folder: Path, text: str) -> None:
    """The content of the whole answer is empty, too."""
    async with model_says(folder, text, FinishReason.LENGTH) as (under_test, client):
        assert (await whole(client)).choices[0].message.content == ""
        *_, last, _ = await raw_events(under_test, HELLO, tools=TOOLS)
        assert json.loads(last)["choices"][0]["delta"] == {"content": ""}


@pytest.mark.parametrize("family", ["hermes", "generic", "harmony"])
async def test_a_models_own_way_of_calling(tmp_path: Path, family: str) -> None:
    """The template describes the tools, a grammar that compiles guides the call, and the gateway reads the call."""
    folder = make_tokenizer_dir(tmp_path / "model", HARMONY if family == "harmony" else TEMPLATES[family])
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>'
    if family == "harmony":
        text = f" to=functions.get_weather<|channel|>commentary json<|message|>{ROME}<|call|>"
    script = answering(TOKENIZER.encode(text).ids, FinishReason.STOP)
    async with openai_with(folder, script, max_model_len=2000) as (under_test, client):
        for choice in ("required", "auto"):
            answer = (await whole(client, tool_choice=choice)).choices[0]
            assert answer.finish_reason == "tool_calls"
            (call,) = answer.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == (
                "get_weather",
                {"city": "Rome"},
            )
            request = await under_test.workers["d0"].next_request()
            prompt = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
            assert '"name": "get_weather"' in prompt
            assert request.sampling_params.structured_output is not None
            *events, _ = await raw_events(under_test, HELLO, tools=TOOLS, tool_choice=choice)
            await under_test.workers["d0"].next_request()
            deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
            pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
            assert "".join(piece["function"]["arguments"] for piece in pieces) == call.function.arguments


async def test_a_forced_call_reaches_the_workers_as_a_grammar(folder: Path) -> None:
    async with model_says(folder, CALLS, routing_mode="local") as (under_test, client):
        named = {"type": "function", "function": {"name": "get_weather"}}
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
        for choice, rest in (("required", ".*"), (named, "[^<]*"), (allowed, ".*")):
            await whole(client, tool_choice=choice, parallel_tool_calls=True)
            request = await under_test.workers["d0"].next_request()
            grammar = request.sampling_params.structured_output
            assert grammar is not None
            assert grammar.source == f"<call (get_weather)>{rest}</call>", "a named function is called once"
        for choice in ("auto", "none"):
            await whole(client, tool_choice=choice, parallel_tool_calls=False)
            request = await under_test.workers["d0"].next_request()
            assert request.sampling_params.structured_output is None


def talkative_with_logprobs(request: EngineRequest) -> list[RequestOutput]:
    answer = answering(TOKENIZER.encode(TALKATIVE).ids, FinishReason.STOP)
    return [
        replace(output, logprobs=(TokenLogprobs(output.token_ids[0], -0.5, 1, ()),))
        for output in answer(request)
    ]


async def test_log_probabilities_are_of_every_token(folder: Path) -> None:
    """This includes the tokens of calls and reasoning, streamed or not."""
    async with gateway_with(
        folder, {}, {"d0": talkative_with_logprobs}, answer_format=MarkedFormat(), max_model_len=2000
    ) as under_test:
        async with openai_for(under_test) as client:
            choice = (await whole(client, logprobs=True)).choices[0]
        assert b"".join(bytes(token.bytes) for token in choice.logprobs.content) == TALKATIVE.encode()
        *events, _ = await raw_events(under_test, HELLO, tools=TOOLS, logprobs=True)
        parts = [json.loads(event)["choices"][0]["logprobs"] for event in events]
        content = [token for part in parts if part for token in part["content"]]
        assert content == [token.model_dump() for token in choice.logprobs.content]


async def test_hidden_reasoning_has_no_log_probabilities(folder: Path) -> None:
    """The tokens of its log-probabilities would spell the reasoning. Only the text has log-probabilities,
    whole and streamed."""
    async with gateway_with(
        folder, {}, {"d0": talkative_with_logprobs}, answer_format=MarkedFormat(), max_model_len=2000
    ) as under_test:
        async with openai_for(under_test) as client:
            hidden = {"include_reasoning": False}
            choice = (await whole(client, logprobs=True, extra_body=hidden)).choices[0]
        tokens = choice.logprobs.content
        assert "".join(token.token for token in tokens) == choice.message.content == "I look < it up."
        *events, _ = await raw_events(under_test, HELLO, tools=TOOLS, logprobs=True, **hidden)
        parts = [json.loads(event)["choices"][0]["logprobs"] for event in events]
        streamed = [token for part in parts if part is not None for token in part["content"]]
        assert streamed == [token.model_dump() for token in tokens]
