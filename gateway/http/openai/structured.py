"""Converts OpenAI's response_format and vLLM's structured_outputs to grammars that answers must match."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from baton.errors import InvalidRequest
from baton.sampling import MAX_GRAMMAR_CHARACTERS, GrammarKind, StructuredOutput
from gateway.http.body import Body

Source = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
MAX_CHOICES = 1_000

ANY_OBJECT = json.dumps({"type": "object"})


class TextFormat(Body):
    """Any text, which is the default."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """The answer must be a JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A schema with its name, as OpenAI's clients send it."""

    name: str = Field(description="Accepted and ignored. Any text, such as `Page[Item]`.")
    description: str | None = Field(None, description="Accepted and ignored.")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="Answers always match the schema.")


class JsonSchemaFormat(Body):
    """The answer must be a JSON value that the schema admits."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """Exactly one of these fields must be set."""

    json_: dict[str, Any] | Source | None = Field(None, alias="json", description="A JSON schema.")
    regex: Source | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Source | None = Field(None, description="A context-free grammar in Lark's notation.")


def _refuse_old(value: object) -> None:
    if value is not None:
        raise PydanticCustomError(
            "not_supported",
            "this old field of vLLM is not supported; use structured_outputs or response_format",
        )


OldGuided = Annotated[
    None, BeforeValidator(_refuse_old), Field(description="vLLM's old field; use structured_outputs.")
]
"""The type of vLLM's old fields, which structured_outputs has replaced."""


def structured_output_of(
    response_format: ResponseFormat | None, outputs: StructuredOutputs | None
) -> StructuredOutput | None:
    """The grammar of the answer. At most one argument may be set."""
    if outputs is not None:
        return _grammar_of(outputs)
    match response_format:
        case JsonObjectFormat():
            return StructuredOutput(GrammarKind.JSON_SCHEMA, ANY_OBJECT)
        case JsonSchemaFormat(json_schema=schema):
            return StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema.schema_))
        case _:
            return None


def _grammar_of(outputs: StructuredOutputs) -> StructuredOutput:
    schema = outputs.json_
    choice = None if outputs.choice is None else "|".join(f"({re.escape(each)})" for each in outputs.choice)
    sources = (
        (GrammarKind.JSON_SCHEMA, json.dumps(schema) if isinstance(schema, dict) else schema),
        (GrammarKind.REGEX, outputs.regex),
        (GrammarKind.REGEX, choice),
        (GrammarKind.LARK, outputs.grammar),
    )
    given = [(kind, source) for kind, source in sources if source is not None]
    if len(given) != 1:
        raise InvalidRequest(
            "structured_output", f"set exactly one of json, regex, choice and grammar, got {len(given)}"
        )
    return StructuredOutput(*given[0])
