"""Messages as the unmodified `anthropic` package sees them, and what workers receive."""

import json
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic, BadRequestError
from anthropic.types import Message, MessageParam, ToolParam
from pydantic import TypeAdapter

from baton.request import EngineRequest, FinishReason, RequestOutput
from baton.sampling import GrammarKind
from gateway.http.anthropic.answers import StreamEvent
from tests.factories.answer_format import MarkedFormat
from tests.factories.anthropic import anthropic_with
from tests.factories.gateway import answering, gateway_with, outputs_of
from tests.factories.models import make_tokenizer

TOKENIZER = make_tokenizer()
ANSWER = TOKENIZER.encode("The cache is the baton").ids
MARKED = '<think>It rains "a lot"</think>Let me see<call weather>{"town": "Nîmes"}</call><call time>{}</call>'
HELLO: list[MessageParam] = [{"role": "user", "content": "Hello"}]
TOOLS: list[ToolParam] = [
    {"name": name, "description": "Says it", "input_schema": {"type": "object", "properties": {}}}
    for name in ("weather", "time")
]
TURN: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": HELLO}


def ends_by_itself(text: str) -> Any:
    return answering(TOKENIZER.encode(text).ids, FinishReason.STOP)


async def accumulated(client: AsyncAnthropic, **fields: Any) -> Message:
    async with client.messages.stream(**TURN | fields) as stream:
        return await stream.get_final_message()


def content_of(message: Message) -> list[dict[str, Any]]:
    """The content without the ids of calls, which differ from request to request."""
    return [block.to_dict() | ({"id": ""} if block.type == "tool_use" else {}) for block in message.content]


async def test_a_whole_message(folder: Path) -> None:
    async with anthropic_with(folder, answering(ANSWER), answering(ANSWER)) as (under_test, client):
        message = await client.messages.create(**TURN | {"system": "Be brief"})
        assert [block.to_dict() for block in message.content] == [
            {"type": "text", "text": "The cache is the baton"}
        ]
        assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
        assert message.id == f"msg_{message._request_id}"
        request = await under_test.workers["d0"].next_request()
        prompt = TOKENIZER.encode(
            "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        ).ids
        assert list(request.prompt_token_ids) == prompt
        assert request.sampling_params.temperature == 1.0
        assert (message.usage.input_tokens, message.usage.output_tokens) == (len(prompt), len(ANSWER))


async def test_the_packages_tool_runner_goes_on_without_a_thread(folder: Path) -> None:
    """The runner first asks the server to keep the conversation."""
    async with anthropic_with(folder, answering(ANSWER), answering(ANSWER)) as (_, client):
        runner = client.beta.messages.tool_runner(
            model="tiny", max_tokens=200, messages=[{"role": "user", "content": "Hello"}], tools=[]
        )
        assert (await runner.until_done()).stop_reason == "max_tokens"


async def test_a_conversation_goes_on_with_the_answer_as_it_came(folder: Path) -> None:
    async with anthropic_with(
        folder, ends_by_itself(MARKED), answer_format=MarkedFormat(), max_model_len=1024
    ) as (under_test, client):
        message = await client.messages.create(**TURN | {"tools": TOOLS})
        assert message.stop_reason == "tool_use"
        thinking, text, weather, time = message.content
        assert thinking.type == "thinking"
        assert thinking.thinking == 'It rains "a lot"'
        assert text.type == "text"
        assert weather.type == time.type == "tool_use"
        assert (weather.name, weather.input, time.input) == ("weather", {"town": "Nîmes"}, {})
        results: MessageParam = {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": weather.id, "content": "Rain", "is_error": True},
                {
                    "type": "tool_result",
                    "tool_use_id": time.id,
                    "content": [{"type": "text", "text": "Noon"}],
                },
            ],
        }
        turns = [*HELLO, {"role": "assistant", "content": message.content}, results]
        await client.messages.create(**TURN | {"messages": turns, "tools": TOOLS})
        await under_test.workers["d0"].next_request()
        request = await under_test.workers["d0"].next_request()
        prompt = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
        assert f"<|im_start|>assistant\n{MARKED}<|im_end|>" in prompt, "the prefix is in the worker's cache"
        assert (
            "<|im_start|>tool weather\nError: Rain<|im_end|>\n<|im_start|>tool time\nNoon<|im_end|>" in prompt
        )


@pytest.mark.parametrize("thinking", [None, {"type": "adaptive", "display": "omitted"}])
async def test_a_stream_adds_up_to_the_same_message(folder: Path, thinking: object) -> None:
    fields = {"tools": TOOLS} | ({} if thinking is None else {"thinking": thinking})
    async with anthropic_with(folder, ends_by_itself(MARKED), answer_format=MarkedFormat()) as (_, client):
        whole = await client.messages.create(**TURN | fields)
        streamed = await accumulated(client, **fields)
    assert content_of(streamed) == content_of(whole)
    assert streamed.to_dict()["usage"] == whole.to_dict()["usage"]
    details = whole.usage.output_tokens_details
    assert details is not None
    assert 0 < details.thinking_tokens < whole.usage.output_tokens
    assert streamed.stop_reason == whole.stop_reason == "tool_use"


async def test_events_are_what_the_description_says(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {"d0": ends_by_itself(MARKED)}, answer_format=MarkedFormat()) as under_test,
        under_test.http() as client,
    ):
        answer = await client.post("/v1/messages", json=TURN | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.content.isascii()
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
        TypeAdapter[Any](StreamEvent).validate_json(data.removeprefix("data: "), strict=True, extra="forbid")
    assert [event.split("\n")[0] for event in events[-2:]] == ["event: message_delta", "event: message_stop"]


async def test_every_reason_to_stop(folder: Path) -> None:
    async def reason(client: AsyncAnthropic, **fields: Any) -> tuple[str | None, str | None]:
        message, streamed = await client.messages.create(**TURN | fields), await accumulated(client, **fields)
        assert (message.stop_reason, message.stop_sequence) == (streamed.stop_reason, streamed.stop_sequence)
        return message.stop_reason, message.stop_sequence

    async with anthropic_with(folder, ends_by_itself("So it is")) as (_, client):
        assert await reason(client) == ("end_turn", None)
        assert await reason(client, stop_sequences=["x", "is"]) == ("stop_sequence", "is")
    async with anthropic_with(folder, answering(ANSWER)) as (_, client):
        assert await reason(client) == ("max_tokens", None)
        assert await reason(client, max_tokens=9999) == ("model_context_window_exceeded", None)
    async with anthropic_with(folder, ends_by_itself("<call weather>{"), answer_format=MarkedFormat()) as (
        _,
        client,
    ):
        assert await reason(client) == ("end_turn", None), "a call that is not whole asks for nothing"


async def test_what_workers_receive(folder: Path) -> None:
    async with anthropic_with(
        folder, answering(ANSWER), answer_format=MarkedFormat(), max_model_len=1024
    ) as (under_test, client):
        await client.messages.create(
            **TURN,
            tools=TOOLS,
            tool_choice={"type": "tool", "name": "time"},
            stop_sequences=["zzz"],
            extra_body={"seed": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
        )
        params = (await under_test.workers["d0"].next_request()).sampling_params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 3, 0.9, 0.1)
        assert (params.stop, params.seed, params.max_tokens) == (("zzz",), 7, 200)
        assert params.structured_output is not None
        assert params.structured_output.source == "<call (time)>.*</call>"
    async with anthropic_with(folder, answering(ANSWER)) as (under_test, client):
        schema = {"type": "object", "properties": {"town": {"type": "string"}}}
        output_config: Any = {"format": {"type": "json_schema", "schema": schema}}
        await client.messages.create(**TURN, output_config=output_config)
        grammar = (await under_test.workers["d0"].next_request()).sampling_params.structured_output
        assert grammar is not None
        assert grammar.kind is GrammarKind.JSON_SCHEMA
        assert (schema | {"additionalProperties": False}).items() <= json.loads(grammar.source).items()


async def test_a_model_that_does_not_think_is_asked_for_nothing_else(folder: Path) -> None:
    async with anthropic_with(folder, answering(ANSWER)) as (_, client):
        for harmless in (
            {"thinking": {"type": "disabled"}},
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
            {"output_config": {"effort": "low"}},
        ):
            assert (await client.messages.create(**TURN | harmless)).stop_reason
        with pytest.raises(BadRequestError, match="'message': \"thinking: "):
            await client.messages.create(**TURN | {"thinking": {"type": "enabled", "budget_tokens": 8}})


async def test_cached_tokens_are_counted_apart(folder: Path) -> None:
    def cached(request: EngineRequest) -> list[RequestOutput]:
        outputs = outputs_of(request, ANSWER)
        outputs[0].num_cached_tokens = 16
        return outputs

    async with anthropic_with(folder, cached) as (_, client):
        whole, streamed = await client.messages.create(**TURN), await accumulated(client)
        count = await client.messages.count_tokens(model="tiny", messages=HELLO)
    for usage in (whole.usage, streamed.usage):
        assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (16, 0)
        assert usage.input_tokens + 16 == count.input_tokens


async def test_counting_tokens_is_exact_and_needs_no_worker(folder: Path) -> None:
    turn: dict[str, Any] = {"model": "tiny", "messages": HELLO, "system": "Be brief", "tools": TOOLS}
    async with anthropic_with(folder, answering(ANSWER), answer_format=MarkedFormat()) as (_, client):
        message = await client.messages.create(max_tokens=5, **turn)
    async with (
        gateway_with(folder, {}, {}, answer_format=MarkedFormat()) as under_test,
        under_test.http() as http,
    ):
        answer = await http.post(
            "/v1/messages/count_tokens", json=turn, headers={"x-request-timeout-ms": "0"}
        )
        assert answer.status_code == 400, "a deadline counts here, too"
        answer = await http.post("/v1/messages/count_tokens", json=turn)
    assert answer.json() == {"input_tokens": message.usage.input_tokens}
