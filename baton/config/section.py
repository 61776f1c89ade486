"""Section: the base of every group of configuration keys, and the wording of its errors; knows no key."""

from collections.abc import Iterable
from typing import Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from baton.errors import ConfigError

MAX_TIME_S = 1_000_000.0
"""The longest wait that a key may ask for, eleven days. In milliseconds, this fits into 32 bits."""

MAX_NUMBER = 2**63 - 1
"""The largest integer that every process can store, and every message can carry."""


class Section(BaseModel):
    """A frozen group of keys; unknown keys are refused, and so are numbers that are not finite."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema with the limit of times, which Helm then checks, too."""
        schema = super().__get_pydantic_json_schema__(core, handler)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for part in (part for name, part in properties.items() if _is_wait(name)):
            for kind in part.get("anyOf", [part]):
                if kind["type"] == "number":
                    kind.setdefault("maximum", MAX_TIME_S)
        return schema

    @field_validator("*")
    @classmethod
    def _check_time(cls, value: object, info: ValidationInfo) -> object:
        if _is_wait(str(info.field_name)) and isinstance(value, float) and value > MAX_TIME_S:
            raise ValueError(f"got {value:g}; a time must not be above {MAX_TIME_S:.0f} (11 days)")
        return value

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: object) -> object:
        if isinstance(value, int) and not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise ValueError(f"got {value}; a number must fit into 64 bits")
        return value

    @field_validator("*")
    @classmethod
    def _check_text(cls, value: object) -> object:
        if isinstance(value, str) and "\0" in value:
            raise ValueError("must not contain a zero byte")
        return value

    def refuse_changed(self, keys: Iterable[str], reason: str, section: str = "") -> None:
        """Raises ValueError for the first of these keys that has another value than its default.

        `reason`: why such a value has no effect. `section`: what precedes the key in an error about the
        whole file, such as `engine.`.
        """
        for key in keys:
            field, value = type(self).model_fields[key], getattr(self, key)
            if value != field.get_default(call_default_factory=True):
                shown = f"{value:g}" if isinstance(value, float) else value
                if isinstance(value, bool):
                    shown = str(value).lower()
                raise ValueError(f"{section}{key} ({shown}) {reason}")

    def with_values(self, source: str, **values: object) -> Self:
        """A copy with other values, as strictly validated as the original.

        `source` names the origin of the values in a ConfigError.
        """
        try:
            return self.model_validate({**self.model_dump(exclude_unset=True), **values})
        except ValidationError as error:
            raise ConfigError(describe(error, source)) from None


def _is_wait(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_ttl_s")  # a time to live has its own limit


_CONFIDENTIAL = {"api_keys", "response_store", "otlp_endpoint"}
"""Keys whose values may contain an API key or a password, perhaps by mistake. All are in `gateway`."""


def describe(error: ValidationError, source: str, *, is_confidential: bool = False) -> str:
    """One line for each offending key: where it is, its value, and what is allowed.

    `is_confidential`: no line quotes a text or an unknown key. The same applies to keys that may hold secrets.
    """
    lines = []
    for problem in error.errors():
        place, is_unknown = problem["loc"], problem["type"] == "extra_forbidden"
        hides = is_confidential or place == ("gateway",) or not _CONFIDENTIAL.isdisjoint(place)
        if hides and is_unknown:
            place = place[:-1]
        where = ": ".join(filter(None, [source, ".".join(map(str, place))]))
        if is_unknown:
            lines.append(f"{where}: has an unknown key" if hides else f"{where}: unknown key")
        elif problem["type"] == "value_error":
            lines.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}")
        else:
            value = problem["input"]
            is_number = isinstance(value, int | float)
            is_huge = isinstance(value, int) and value.bit_length() > 1024  # Python may refuse to write it
            shown = "a huge number" if is_huge else repr(value)
            got = shown if is_number or not hides else f"a value of type {type(value).__name__}"
            lines.append(f"{where}: got {got}; {problem['msg']}")
    return "\n".join(lines)
