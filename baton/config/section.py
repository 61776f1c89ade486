"""Section: the base of every group of configuration keys, and the wording of its errors; knows no key."""

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.errors import ConfigError


class Section(BaseModel):
    """A frozen group of keys; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    def with_values(self, source: str, **values: object) -> Self:
        """A copy with other values, as strictly validated as the original.

        `source` names the origin of the values in a ConfigError.
        """
        try:
            return self.model_validate({**self.model_dump(exclude_unset=True), **values})
        except ValidationError as error:
            raise ConfigError(describe(error, source)) from None


_CONFIDENTIAL = {"api_keys", "response_store", "otlp_endpoint"}
"""Keys whose values may contain an API key or a password, perhaps at the wrong place. All are in `gateway`."""


def describe(error: ValidationError, source: str, *, is_confidential: bool = False) -> str:
    """One line for each offending key: where it is, its value, and what is allowed.

    `is_confidential`: no line quotes a text or an unknown key. So it is with keys that may hold secrets.
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
            got = repr(value) if is_number or not hides else f"a value of type {type(value).__name__}"
            lines.append(f"{where}: got {got}; {problem['msg']}")
    return "\n".join(lines)
