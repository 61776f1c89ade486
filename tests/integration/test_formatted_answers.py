"""An answer in a response format is text in every API, though tools are offered and its strings spell a call."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from openai.types.responses import ResponseFormatTextJSONSchemaConfig
from pydantic import BaseModel

from baton.request import FinishReason
from gateway.conversation import AnswerFormat
from tests.factories.conversations import HARMONY, format_of
from tests.factories.gateway import answering, gateway_with, silent
from tests.factories.guided import Guide
from tests.factories.models import make_tokenizer, make_tokenizer_dir
from tests.factories.openai import openai_with

T = TypeVar("T")

CALL = "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>"
ANSWER = json.dumps({"a": f"So one calls: {CALL}", "b": 1})
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
TURNS = [{"role": "user", "content": "How does one call f?"}]
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": TURNS,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "/v1/responses": {
        "input": TURNS,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "messages": TURNS,
        "max_tokens": 500,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}


def strings_in(value: object) -> list[str]:
    """All strings of a JSON value, in order."""
    if isinstance(value, str):
        return [value]
    values: Sequence[object] = (
        [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    )
    return [text for each in values for text in strings_in(each)]


async def assert_text(
    folder: Path, path: str, ids: list[int], text: str, family: AnswerFormat | None
) -> None:
    """The worker's tokens become this text and no call, in a whole answer and in a stream."""
    async with (
        gateway_with(
            folder, {}, {"d0": answering(ids, FinishReason.STOP)}, answer_format=family, max_model_len=4096
        ) as under_test,
        under_test.http() as client,
    ):
        body = {"model": "tiny", **APIS[path]}
        whole = await client.post(path, json=body)
        stream = await client.post(path, json=body | {"stream": True})
    assert whole.status_code == stream.status_code == 200, whole.text
    assert text in strings_in(whole.json())
    lines = [line.removeprefix("data: ") for line in stream.text.split("\n") if line.startswith("data: {")]
    streamed = [piece for line in lines for piece in strings_in(json.loads(line)) if piece in text]
    assert text in "".join(streamed)
    for answer in (whole.text, *lines):
        assert not {"tool_calls", "tool_use", "function_call"} & set(strings_in(json.loads(answer)))


@pytest.mark.parametrize("path", APIS)
async def test_a_formatted_answer_that_spells_a_call_is_text(folder: Path, path: str) -> None:
    await assert_text(folder, path, make_tokenizer().encode(ANSWER).ids, ANSWER, format_of("qwen_coder"))


@pytest.mark.parametrize("path", APIS)
async def test_a_formatted_answer_that_spells_harmonys_tokens_is_text(tmp_path: Path, path: str) -> None:
    tokenizer = Guide(has_markers=True).tokenizer
    folder = make_tokenizer_dir(tmp_path, HARMONY)
    tokenizer.save(str(folder / "tokenizer.json"))

    def ids_of(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    text = json.dumps(
        {"a": "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|message|>{}<|call|>"}
    )
    by_letters = [token_id for letter in text for token_id in ids_of(letter)]
    ids = [*ids_of("<|channel|>final<|message|>"), *by_letters, *ids_of("<|return|>")]
    await assert_text(folder, path, ids, text, None)


REFUSED = {
    "/v1/chat/completions": "response_format",
    "/v1/completions": "structured_outputs",
    "/v1/responses": "text.format",
    "/v1/messages": "output_config.format",
}


@pytest.mark.parametrize("path", REFUSED)
async def test_a_schema_may_not_change_how_json_is_written(folder: Path, path: str) -> None:
    plain = {"prompt": "x", "structured_outputs": {"json": SCHEMA}}
    text = json.dumps({"model": "tiny", **APIS.get(path, plain)})
    body = json.loads(text.replace('"type": "object", "properties"', '"x-guidance": {}, "properties"'))
    async with (
        gateway_with(folder, {}, {"d0": silent}) as under_test,
        under_test.http() as client,
    ):
        refused = await client.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(
        f"{REFUSED[path]}: the schema has the key 'x-guidance'"
    )


class Page(BaseModel, Generic[T]):
    """A page of items. pydantic gives `Page[str]` a name with brackets."""

    items: list[T]


async def test_the_name_of_a_schema_may_have_any_characters(folder: Path) -> None:
    """The packages `openai` and `pydantic-ai` send the name of a model, which is `Page[str]` here."""
    ids = make_tokenizer().encode('{"items":["a"]}').ids
    async with openai_with(folder, answering(ids, FinishReason.STOP)) as (_, client):
        chat = await client.chat.completions.parse(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], response_format=Page[str]
        )
        response = await client.responses.parse(model="tiny", input="Hello", text_format=Page[str])
    assert chat.choices[0].message.parsed == response.output_parsed == Page(items=["a"])
    assert response.text is not None
    assert isinstance(response.text.format, ResponseFormatTextJSONSchemaConfig)
    assert response.text.format.name == "Page[str]"
