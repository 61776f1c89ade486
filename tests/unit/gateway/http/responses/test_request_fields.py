"""Every field of the public API is honoured or refused by name, and the page says which."""

from pathlib import Path
from typing import Any, get_args

import pytest
from openai.types.responses import (
    ParsedResponseFunctionToolCall,
    ParsedResponseOutputMessage,
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
    response_create_params,
)
from openai.types.responses.input_token_count_params import InputTokenCountParams
from pydantic import TypeAdapter, ValidationError

from baton.errors import InvalidRequest
from gateway.http.responses.answers import ResponseObject
from gateway.http.responses.create_request import (
    InputTokensRequest,
    ResponseRequest,
)
from gateway.http.responses.items import ItemReference, as_kept

PAGE = (Path(__file__).parents[5] / "docs" / "responses.md").read_text()
PUBLIC = {
    name
    for kind in get_args(response_create_params.ResponseCreateParams)
    for base in (kind, response_create_params.ResponseCreateParamsBase)
    for name in getattr(base, "__annotations__", {})
}


def error_of(**fields: Any) -> str:
    with pytest.raises((ValidationError, InvalidRequest)) as caught:
        ResponseRequest.model_validate({"model": "tiny", "input": "Hello"} | fields)
    return str(caught.value)


def test_every_field_of_the_public_api_is_known_and_on_the_page() -> None:
    assert len(PUBLIC) >= 33
    assert sorted(PUBLIC - set(ResponseRequest.model_fields)) == []
    assert [name for name in sorted(PUBLIC) if f"`{name}`" not in PAGE] == []


def test_the_page_tells_of_every_field_of_ours() -> None:
    assert [name for name in ResponseRequest.model_fields if f"`{name}`" not in PAGE] == []


def test_the_token_count_knows_the_public_fields() -> None:
    assert sorted(set(InputTokenCountParams.__annotations__) - set(InputTokensRequest.model_fields)) == []


def refused_fields() -> list[str]:
    schemas = ResponseRequest.model_json_schema()["properties"]
    return [name for name, schema in schemas.items() if schema.get("type") == "null"]


@pytest.mark.parametrize("name", refused_fields())
def test_a_refused_field_is_named_and_on_the_page_as_refused(name: str) -> None:
    assert f"\n{name}\n" in error_of(**{name: {"x": 1}})
    refused = next(line for line in PAGE.splitlines() if line.startswith("| refused |"))
    assert f"`{name}`" in refused


def test_some_are_refused() -> None:
    assert {"prompt", "conversation", "prompt_cache_options"} <= set(refused_fields())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"background": True}, "background"),
        ({"background": 0}, "background"),
        ({"stream": True, "stream_options": {"include_obfuscation": 0}}, "include_obfuscation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"tools": [{"type": "local_shell"}]}, "local_shell"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "custom"),
        ({"tool_choice": {"type": "file_search"}}, "file_search"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "computer_call"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input_image",
        ),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options: needs stream: true"),
        ({"top_logprobs": 2}, "top_logprobs: needs include"),
        ({"input": None}, "input: required, but missing"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    assert words in error_of(**fields)


def test_a_summary_of_any_length_may_be_asked_for() -> None:
    for summary in ("auto", "concise", "detailed"):
        body = {"model": "tiny", "input": "Hello", "reasoning": {"summary": summary}}
        ResponseRequest.model_validate(body)


def test_objects_of_the_package_may_be_sent_back_whole() -> None:
    """Programs dump these objects with all of their empty fields."""
    text = {"type": "output_text", "text": "A", "annotations": [], "logprobs": []}
    sent = [
        ResponseReasoningItem.model_validate({"id": "rs_1", "type": "reasoning", "summary": []}),
        ResponseOutputMessage.model_validate(
            {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        ),
        ResponseFunctionToolCall.model_validate(
            {"type": "function_call", "id": "fc", "call_id": "c", "name": "f", "arguments": "{}"}
        ),
    ]
    for by_alias in (False, True):
        items = [item.model_dump(by_alias=by_alias) for item in sent]
        body = ResponseRequest.model_validate({"model": "tiny", "input": items})
        assert [item.type for item in body.items] == ["reasoning", "message", "function_call"]


def test_objects_that_the_package_parsed_may_be_sent_back_whole() -> None:
    text = {"type": "output_text", "text": '{"a": 1}', "annotations": [], "parsed": {"a": 1}}
    sent = [
        ParsedResponseOutputMessage[Any].model_validate(
            {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        ),
        ParsedResponseFunctionToolCall.model_validate(
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "parsed_arguments": {}}
        ),
    ]
    items = [item.model_dump(serialize_as_any=True) for item in sent]
    assert items[0]["content"][0]["parsed"] == {"a": 1}
    assert items[1]["parsed_arguments"] == {}
    body = ResponseRequest.model_validate({"model": "tiny", "input": items})
    kept = [as_kept(item, "x") for item in body.items if not isinstance(item, ItemReference)]
    assert "parsed" not in str(kept)


def test_the_description_has_what_the_package_needs() -> None:
    needed = {name for name, field in Response.model_fields.items() if field.is_required()}
    assert needed - set(TypeAdapter(ResponseObject).json_schema()["properties"]) == set()


def test_seeds_and_penalties_are_those_of_chats() -> None:
    body = ResponseRequest.model_validate(
        {
            "model": "tiny",
            "input": "x",
            "seed": 3,
            "top_k": 4,
            "min_p": 0.1,
            "max_output_tokens": 9,
            "stop": "!",
        }
    )
    params = body.sampling()
    assert (params.seed, params.top_k, params.min_p, params.max_tokens, params.stop) == (3, 4, 0.1, 9, ("!",))
