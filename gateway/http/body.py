"""What the bodies of all APIs have in common: strict fields, and fields that are refused by name."""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError, PydanticKnownError

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


def _refuse_number(value: object) -> object:
    if not isinstance(value, bool) and value == 0:
        raise PydanticKnownError("literal_error", {"expected": "False"})
    return value


OnlyFalse = Annotated[Literal[False], BeforeValidator(_refuse_number)]
"""The type of a field that may only be false. In Python, 0 equals False, so `Literal` alone would also accept 0."""


class Body(BaseModel):
    """A request's body, or a part of it. Unknown fields are errors, and a number in quotes is not a number.

    `null` means that a field is absent, as in OpenAI's API.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
