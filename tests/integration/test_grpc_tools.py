"""Tools and reasoning over gRPC: events beside the raw text, and the command line's calls."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.request import FinishReason
from baton.v1 import generation_service_pb2 as pb
from cli.commands.generate import ask, to_json
from cli.main import main
from cli.target import Target
from examples.baton_client import BatonClient, Part
from gateway import GatewayError
from gateway.client import RequestEvent
from gateway.conversation import (
    AnswerParts,
    ChatMessage,
    Conversation,
    Tool,
    ToolCall,
    ToolChoice,
    ToolUse,
)
from tests.factories.answer_format import MarkedFormat
from tests.factories.gateway import GatewayUnderTest, answering, gateway_with
from tests.factories.models import make_tokenizer

TOKENIZER = make_tokenizer()
RAW = '<think>hm</think>Well.<call f>{"x": "é"}</call><call f>{}</call>'
HELLO = ChatMessage("user", "Hello")
TOOL = Tool("f", "It is f", {"type": "object", "properties": {"x": {"type": "string"}}})


@asynccontextmanager
async def model_says(folder: Path, text: str, **config: Any) -> AsyncIterator[GatewayUnderTest]:
    script = answering(TOKENIZER.encode(text).ids, FinishReason.STOP)
    async with gateway_with(
        folder, {"p0": script}, {"d0": script}, answer_format=MarkedFormat(), max_model_len=1000, **config
    ) as under_test:
        yield under_test


async def events_of(
    under_test: GatewayUnderTest, conversation: Conversation, **fields: Any
) -> list[RequestEvent]:
    return [event async for event in under_test.client.generate(conversation=conversation, **fields)]


def parts_of(events: Sequence[RequestEvent]) -> AnswerParts:
    parts = AnswerParts()
    for event in events:
        parts.add_events(event.parts)
    return parts


def num_reasoning_tokens(events: Sequence[RequestEvent]) -> int:
    completion = events[-1].completion
    assert completion is not None
    return completion.usage["reasoning_tokens"]


async def test_events_say_what_the_raw_text_means(folder: Path) -> None:
    async with model_says(folder, RAW) as under_test:
        events = await events_of(under_test, Conversation((HELLO,), (TOOL,)), request_id="r")
        assert "".join(event.text for event in events) == RAW
        parts = parts_of(events)
        assert (parts.reasoning, parts.text) == ("hm", "Well.")
        assert [(call.name, call.arguments) for call in parts.calls] == [("f", '{"x": "é"}'), ("f", "{}")]
        assert parts.ends_with_calls
        ids = [id_ for event in events for id_ in event.call_ids]
        assert len(set(ids)) == 2
        again = await events_of(under_test, Conversation((HELLO,), (TOOL,)), request_id="r")
        others = [id_ for event in again for id_ in event.call_ids]
        assert len({*ids, *others}) == 4, "the next turn may have the same request_id"
        assert num_reasoning_tokens(events) in range(1, len(TOKENIZER.encode("<think>hm</think>").ids) + 1)


async def test_a_plain_chat_has_no_events(folder: Path) -> None:
    async with model_says(folder, RAW) as under_test:
        events = await under_test.ask(None, messages=[("user", "Hello")])
        assert "".join(event.text for event in events) == RAW
        assert not any(event.parts for event in events)
        assert num_reasoning_tokens(events) > 0, "counted whether events are asked for or not"
        events = await under_test.ask()
        assert num_reasoning_tokens(events) == 0, "a text is no conversation"


async def test_results_of_calls_and_reasoning_reach_the_template(folder: Path) -> None:
    async with model_says(folder, "ok", routing_mode="local") as under_test:
        turns = (
            HELLO,
            ChatMessage("assistant", "", "hm", (ToolCall("a", "f", "{}"),)),
            ChatMessage("tool", "7", tool_call_id="a"),
        )
        await events_of(under_test, Conversation(turns, (TOOL,)))
        request = await under_test.workers["d0"].next_request()
        prompt = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
        assert "assistant\n<think>hm</think><call f>{}</call><|im_end|>" in prompt
        assert "tool f\n7<|im_end|>" in prompt


async def test_refusals_name_the_field_in_the_messages_terms(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering([5])}) as under_test:
        bad = ToolChoice(ToolUse.REQUIRED, ("g",))
        with pytest.raises(GatewayError, match=r"chat\.tool_choice\.names\.0: 'g' is not one") as caught:
            await events_of(under_test, Conversation((HELLO,), (TOOL,), bad))
        assert caught.value.details.field == "chat.tool_choice.names.0"


async def parts_from(target: str, chat: pb.Chat) -> list[Part]:
    async with BatonClient(target) as client:
        return [part async for part in client.generate(chat=chat, request_id="r")]


async def test_the_examples_client_has_the_same_events(folder: Path) -> None:
    chat = pb.Chat(messages=[pb.Chat.Message(role="user", content="Hello")], tools=[pb.Tool(name="f")])
    async with model_says(folder, RAW) as under_test:
        events = [event for part in await parts_from(under_test.grpc_target, chat) for event in part.events]
        assert "".join(event.reasoning for event in events) == "hm"
        assert "".join(event.text for event in events) == "Well."
        assert "".join(event.arguments_delta.json for event in events) == '{"x": "é"}{}'
        ids = [event.call_begins.id for event in events if event.HasField("call_begins")]
        assert len(set(ids)) == 2


async def test_the_commands_answer_has_calls_and_reasoning(folder: Path) -> None:
    async with model_says(folder, RAW) as under_test:
        shown: list[str] = []
        conversation = Conversation((HELLO,), (TOOL,))
        answer = await ask(
            Target(under_test.grpc_target), shown.append, conversation=conversation, request_id="r"
        )
        assert "".join(shown) == "Well."
        printed = to_json(answer)
        assert (printed["text"], printed["reasoning"]) == ("Well.", "hm")
        first = printed["tool_calls"][0]
        assert first.pop("id").startswith("call_")
        assert first == {"name": "f", "arguments": '{"x": "é"}', "is_whole": True}
        assert len(printed["token_ids"]) == len(TOKENIZER.encode(RAW).ids)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[1]", "tool 1 must be an object like"),
        ('[{"type": "custom", "custom": {}}]', "tool 1 must be an object like"),
        ('{"type": "function", "function": {"name": "f", "foo": 1}}', "unknown field 'foo'"),
        ('{"type": "function", "function": {"name": 7}}', "name must be of type str, got int"),
        ('{"type": "function", "function": {}}', "needs a name"),
        ("{", "EOF while parsing an object"),
        ('{"type": "custom", "type": "function", "function": {"name": "f"}}', "'type' appears twice"),
    ],
)
def test_a_bad_file_of_tools_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, problem: str
) -> None:
    file = tmp_path / "tools.json"
    file.write_text(content)
    assert main(["generate", "--tools", str(file), "hi"]) != 0
    error = capsys.readouterr().err
    assert problem in error
    assert str(file) in error


def test_a_file_of_tools_without_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--tools", "/dev/zero", "hi"]) != 0
    assert "--tools /dev/zero: has more than 4194304 bytes" in capsys.readouterr().err


async def test_the_command_prints_calls_as_lines(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import asyncio

    file = tmp_path / "tools.json"
    function = {"name": "f", "description": "It is f", "parameters": dict(TOOL.parameters), "strict": False}
    file.write_text(json.dumps([{"type": "function", "function": function}]))
    async with model_says(folder, RAW) as under_test:
        command = ["generate", "--target", under_test.grpc_target, "--tools", str(file), "hi"]
        assert await asyncio.to_thread(main, command) == 0
        assert capsys.readouterr().out == 'Well.\nf({"x": "é"})\nf({})\n'
        assert await asyncio.to_thread(main, [*command, "--tool-choice", "g"]) != 0
        assert "chat.tool_choice.names.0: 'g' is not one of the tools" in capsys.readouterr().err
