"""/v1/responses as the unmodified `openai` package sees it: tools, reasoning, forms, streams, several turns."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError
from openai.types.responses import (
    FunctionToolParam,
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)
from pydantic import BaseModel

from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput, TokenLogprobs
from baton.sampling import GrammarKind
from tests.factories.conversations import THINKING
from tests.factories.gateway import Script, beginning, failing, failure_of, outputs_of, silent
from tests.factories.models import EOS_TOKEN_ID, make_tokenizer, make_tokenizer_dir
from tests.factories.openai import openai_with

TOKENIZER = make_tokenizer()
LOOK: FunctionToolParam = {
    "type": "function",
    "name": "look",
    "description": "Looks at a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    "strict": False,
}
F = {"type": "function", "name": "f"}
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "the sea"}}\n</tool_call>'


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template has reasoning, and tools in Hermes' format."""
    return make_tokenizer_dir(tmp_path_factory.mktemp("thinker"), THINKING)


def saying(*answers: str, finish: FinishReason = FinishReason.STOP) -> Script:
    """One answer to each request in turn."""
    left: Iterator[str] = iter(answers)

    def script(request: EngineRequest) -> list[RequestOutput]:
        return outputs_of(request, TOKENIZER.encode(next(left)).ids, finish=finish)

    return script


def prompt_of(request: EngineRequest) -> str:
    return str(TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False))


async def test_a_whole_answer(folder: Path) -> None:
    async with openai_with(folder, saying("The cache is the baton")) as (under_test, client):
        response = await client.responses.create(
            model="tiny",
            input="Hello",
            instructions="Be brief",
            metadata={"a": "b"},
            user="u",
            max_output_tokens=50,
        )
        Response.model_validate(response.to_dict())
        assert response.output_text == "The cache is the baton"
        assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
        assert (response.metadata, response.user, response.instructions) == ({"a": "b"}, "u", "Be brief")
        assert response.id == f"resp_{response._request_id}"
        request = await under_test.workers["d0"].next_request()
        expected = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        assert prompt_of(request) == expected
        assert request.sampling_params.max_tokens == 50
        usage = response.usage
        assert usage is not None
        counts = (usage.input_tokens, usage.output_tokens, usage.total_tokens)
        num_answer = len(TOKENIZER.encode("The cache is the baton").ids)
        assert counts == (len(request.prompt_token_ids), num_answer, sum(counts[:2]))
        assert usage.output_tokens_details.reasoning_tokens == 0


async def test_an_answer_that_is_cut_off_is_incomplete(folder: Path) -> None:
    async with openai_with(folder, saying("The", finish=FinishReason.LENGTH)) as (_, client):
        response = await client.responses.create(model="tiny", input="Hello")
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert isinstance(response.output[0], ResponseOutputMessage)
        assert response.output[0].status == "incomplete"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_loop_with_tools_and_reasoning(thinker: Path, is_stream: bool) -> None:
    """The model thinks, calls, gets the result and answers. The second request continues the first response by its
    id."""
    script = saying(f"<think>\nLook first</think>\n\n{CALL}", "<think>\nI see</think>\n\nIt is blue")

    async with openai_with(thinker, script, max_model_len=2048) as (under_test, client):

        async def create(**fields: Any) -> Any:
            if not is_stream:
                return await client.responses.create(model="tiny", tools=[LOOK], **fields)
            async with client.responses.stream(model="tiny", tools=[LOOK], **fields) as stream:
                async for _ in stream:
                    pass
                return await stream.get_final_response()

        first = await create(input="How is the sea?")
        thought, call = first.output
        assert isinstance(thought, ResponseReasoningItem)
        assert thought.content is not None
        assert [part.text for part in thought.content] == ["Look first"]
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.name, json.loads(call.arguments)) == ("look", {"place": "the sea"})
        reasoning = TOKENIZER.encode("<think>\nLook first</think>").ids
        assert first.usage.output_tokens_details.reasoning_tokens in range(
            len(reasoning) - 12, len(reasoning) + 1
        )

        result = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
        second = await create(input=[result], previous_response_id=first.id)
        assert second.output_text == "It is blue"
        await under_test.workers["d0"].next_request()
        prompt = prompt_of(await under_test.workers["d0"].next_request())
        assert "How is the sea?" in prompt
        assert '{"name": "look", "arguments": {"place": "the sea"}}' in prompt
        assert prompt.index("How is the sea?") < prompt.index("</tool_call>") < prompt.index("blue")


async def test_the_whole_conversation_may_be_sent_instead(thinker: Path) -> None:
    script = saying(f"<think>\nLook</think>\n\n{CALL}", "Blue", "Blue")
    async with openai_with(thinker, script, max_model_len=2048) as (under_test, client):
        first = await client.responses.create(model="tiny", tools=[LOOK], input="How is the sea?")
        call = first.output[1]
        assert isinstance(call, ResponseFunctionToolCall)
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
        whole: Any = [{"role": "user", "content": "How is the sea?"}, *first.output, result]
        await client.responses.create(model="tiny", tools=[LOOK], input=whole, store=False)
        await client.responses.create(
            model="tiny", tools=[LOOK], input=[result], previous_response_id=first.id
        )
        _, sent, continued = [await under_test.workers["d0"].next_request() for _ in range(3)]
        assert prompt_of(sent) == prompt_of(continued)


async def test_events_come_in_the_documented_order(thinker: Path) -> None:
    script = saying(f"<think>\nHm</think>\n\nLook:\n{CALL}")
    async with openai_with(thinker, script, max_model_len=2048) as (_, client):
        stream = await client.responses.create(model="tiny", tools=[LOOK], input="Hello", stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events if not event.type.endswith("delta")]
    part = ["output_item.added", "content_part.added", "X.done", "content_part.done", "output_item.done"]
    assert names == [
        *("created", "in_progress"),
        *(name.replace("X", "reasoning_text") for name in part),
        *(name.replace("X", "output_text") for name in part),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


async def test_a_form_is_a_grammar_and_is_parsed(folder: Path) -> None:
    class Place(BaseModel):
        name: str

    async with openai_with(folder, saying('{"name": "Paris"}')) as (under_test, client):
        response = await client.responses.parse(model="tiny", input="Where?", text_format=Place)
        assert response.output_parsed == Place(name="Paris")
        grammar = (await under_test.workers["d0"].next_request()).sampling_params.structured_output
        assert grammar is not None
        assert grammar.kind is GrammarKind.JSON_SCHEMA
        assert json.loads(grammar.source)["properties"].keys() == {"name"}
        assert response.text is not None
        assert response.text.format is not None
        assert response.text.format.type == "json_schema"


async def test_log_probabilities_of_the_text_alone(thinker: Path) -> None:
    """The reasoning before the text has none. The end of sequence belongs to the text."""
    text = "<think>\nHm</think>\n\nBlue"
    token_ids = [*TOKENIZER.encode(text).ids, EOS_TOKEN_ID]

    def script(request: EngineRequest) -> list[RequestOutput]:
        assert request.sampling_params.logprobs == 1
        return [
            RequestOutput(
                request_id=request.request_id,
                first_position=0,
                token_ids=tuple(token_ids),
                logprobs=tuple(TokenLogprobs(each, -1.0, 1, ((each, -1.0),)) for each in token_ids),
                finish_reason=FinishReason.STOP,
            )
        ]

    async with openai_with(thinker, script, max_model_len=2048) as (_, client):
        response = await client.responses.create(
            model="tiny", input="Hi", top_logprobs=1, include=["message.output_text.logprobs"]
        )
        message = response.output[-1]
        assert isinstance(message, ResponseOutputMessage)
        assert message.content[0].type == "output_text"
        assert message.content[0].logprobs is not None
        tokens = "".join(position.token for position in message.content[0].logprobs)
        assert tokens.strip() == f"Blue{TOKENIZER.decode([EOS_TOKEN_ID], skip_special_tokens=False)}"


async def test_what_fails_before_the_first_token_has_a_status(folder: Path) -> None:
    async with openai_with(folder, failing(ErrorKind.INVALID_REQUEST, "structured_output: no")) as (
        _,
        client,
    ):
        for is_stream in (False, True):
            with pytest.raises(BadRequestError) as caught:
                await client.responses.create(model="tiny", input="Hello", stream=is_stream)
            assert caught.value.param == "text.format", "by the client's name for it"


async def test_what_fails_later_is_the_last_event(folder: Path) -> None:
    async with openai_with(folder, beginning(TOKENIZER.encode("The cache").ids)) as (under_test, client):
        stream = await client.responses.create(model="tiny", input="Hello", stream=True)
        events: list[Any] = []
        async for event in stream:
            if not events:
                request = await under_test.workers["d0"].next_request()
                failure = failure_of(request, ErrorKind.INVALID_REQUEST, "structured_output: it cannot go on")
                failure.first_position = len(TOKENIZER.encode("The cache").ids)
                under_test.workers["d0"].say(request, [failure])
            events.append(event)
        last = events[-1]
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        assert last.response.error is not None
        assert last.response.error.code == "invalid_prompt"
        assert "it cannot go on" in last.response.error.message
        assert last.response.output_text == "The cache"
        stored = await client.responses.retrieve(last.response.id)
        assert stored.to_dict() == last.response.to_dict()


async def test_the_oldest_exchanges_are_left_out_if_asked(folder: Path) -> None:
    turns: Any = [
        {"role": role, "content": f"{number} " + "word " * 20}
        for number in range(8)
        for role in ("user", "assistant")
    ]
    turns.append({"role": "user", "content": "last"})
    async with openai_with(folder, saying("Yes", "Yes")) as (under_test, client):
        with pytest.raises(BadRequestError) as caught:
            await client.responses.create(model="tiny", input=turns)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        await client.responses.create(model="tiny", input=turns, instructions="Be brief", truncation="auto")
        prompt = prompt_of(await under_test.workers["d0"].next_request())
        assert prompt.startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\n")
        assert "user\nlast" in prompt
        assert "user\n0 " not in prompt
        assert "user\n7 " in prompt


async def test_tokens_are_counted_without_a_worker(folder: Path) -> None:
    async with openai_with(folder, saying("Yes")) as (under_test, client):
        count = await client.responses.input_tokens.count(
            model="tiny", input="Hello", instructions="Be brief"
        )
        await client.responses.create(model="tiny", input="Hello", instructions="Be brief")
        request = await under_test.workers["d0"].next_request()
        assert count.input_tokens == len(request.prompt_token_ids)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "other", "input": "x"}, "model"),
    ({"input": "x", "tools": [F, F]}, "tools.1.name"),
    ({"input": "x", "tools": [F | {"name": "a b"}]}, "tools.0.name"),
    ({"input": "x", "tools": [F | {"parameters": {"type": "string"}}]}, "tools.0.parameters.type"),
    ({"input": "x", "tool_choice": {"type": "function", "name": "nope"}}, "tool_choice.name"),
    (
        {"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [F]}},
        "tool_choice.tools.0.name",
    ),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input"),
    (
        {
            "input": "x",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nope"}}},
        },
        "text.format",
    ),
    ({"input": "x", "max_output_tokens": 3, "extra_body": {"min_tokens": 9}}, "min_tokens"),
    ({"input": "x", "previous_response_id": "resp_nope"}, "previous_response_id"),
    ({"input": [{"type": "item_reference", "id": "msg_nope_0"}]}, "input.0.id"),
]


async def test_errors_name_the_clients_field(folder: Path) -> None:
    async with openai_with(folder, silent) as (_, client):
        for fields, param in REFUSED:
            with pytest.raises((BadRequestError, NotFoundError)) as caught:
                await client.responses.create(**({"model": "tiny"} | fields))
            assert caught.value.param == param, fields
