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


def describe(error: ValidationError, source: str) -> str:
    """One line for each offending key: where it is, its value, and what is allowed."""
    lines = []
    for problem in error.errors():
        where = ": ".join(filter(None, [source, ".".join(str(part) for part in problem["loc"])]))
        if problem["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key")
        elif problem["type"] == "value_error":
            lines.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}")
        else:
            lines.append(f"{where}: got {problem['input']!r}; {problem['msg']}")
    return "\n".join(lines)
