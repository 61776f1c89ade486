"""What the bodies of all APIs have in common: strict fields, and fields that are refused by name."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from gateway.strict_json import MAX_INTEGER, MIN_INTEGER

T = TypeVar("T")

MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


def _refuse(value: object) -> None:
    if value is not None:
        raise PydanticCustomError("not_supported", "this field is not supported; remove it")


def _without_zero_fraction(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and MIN_INTEGER <= value <= MAX_INTEGER:
        return int(value)
    return value


Whole = Annotated[T, BeforeValidator(_without_zero_fraction)]
"""`Whole[int]` and `Whole[int | None]` are the types of fields with one integer, which may be written `5.0`. Some
languages have only one type of number, and JSON Schema calls 5.0 an integer, too."""

PARSED = "Accepted and ignored: `parse` and `stream` of the `openai` package add what they read."
"""The description of the fields that this package adds to an answer, and then sends back with it."""

NotSupported = Annotated[None, BeforeValidator(_refuse), Field(description="Not supported; only `null`.")]


@dataclass(frozen=True, eq=False)  # `typing` takes equal annotations for the same, and True equals 1.0
class Only:
    """`Annotated[None, Only(value)]` is the type of a field that may only have this value, which changes nothing."""

    value: bool | float | str | list[None]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [self.value, None], "description": "Has no effect; other values are not supported."}

    def _check(self, given: object) -> None:
        is_same_type = isinstance(given, bool) == isinstance(self.value, bool)  # in Python, 0 equals False
        if given is not None and not (is_same_type and given == self.value):
            value = repr(self.value) if isinstance(self.value, str) else json.dumps(self.value)
            raise PydanticCustomError("not_supported", "only {value} is supported", {"value": value})


class Body(BaseModel):
    """A request's body, or a part of it. Unknown fields are errors, and a number in quotes is not a number.

    `null` means that a field is absent, as in OpenAI's API.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
