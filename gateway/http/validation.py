"""Describes a body's problem in the client's terms: from pydantic's findings to a field and its problem."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

MAX_VALUE_CHARACTERS = 60
"""An error message repeats at most this many characters of a wrong value, and of each key on the way to it."""

WORDS = {
    "extra_forbidden": "unknown field; remove it",
    "missing": "required, but missing",
    "json_invalid": "invalid JSON: {error}",
    "model_attributes_type": "must be a JSON object",
    "too_short": "must have at least {min_length} item(s), got {actual_length}",
    "too_long": "must have at most {max_length} items, got {actual_length}",
    "union_tag_invalid": "must be one of {expected_tags}, got '{tag}'",
    "union_tag_not_found": "required, but missing",
}
"""Our message by pydantic's error type, for types whose own message is about Python."""

TAG_FINDINGS = ("union_tag_invalid", "union_tag_not_found")
"""Findings about the field that says an object's kind, such as `type`. pydantic reports the path of the
object, not of this field."""

SIZE_FINDINGS = ("too_short", "too_long")
"""Findings about a number of items. pydantic does not count the items of an object."""


def first_problem(findings: Sequence[dict[str, Any]], body: Any) -> tuple[str, str]:
    """The field's dotted path in the body, and the problem.

    If a value may have several types, pydantic has a finding for each type. The findings with the longest
    path into the value are reported.
    """
    top = findings[0]["loc"][:2]
    located = [(_path(finding, body), finding) for finding in findings if finding["loc"][:2] == top]
    furthest = max((path for path, _ in located), key=len)
    reported = [finding for path, finding in located if path == furthest]
    problem = " or ".join(dict.fromkeys(_words(finding) for finding in reported))
    if reported[0]["type"] not in WORDS and isinstance(reported[0]["input"], str | int | float):
        problem += f", got {_shortened(reported[0]['input'])}"
    return ".".join(map(_cut, furthest)) or "body", problem


def _path(finding: dict[str, Any], body: Any) -> tuple[str, ...]:
    """The path to the value, without the names of types that pydantic inserts."""
    if finding["type"] == "json_invalid":
        return ()
    root, *parts = finding["loc"]
    if root != "body":
        return tuple(str(part) for part in parts)  # the finding is about a header, or about the URL
    readings = list(_readings(parts, body, finding["type"] == "missing"))
    path = next((path for path, value in readings if value is finding["input"]), readings[0][0])
    if finding["type"] in TAG_FINDINGS and isinstance(finding["input"], dict):
        field = finding["ctx"]["discriminator"].strip("'")
        return (*path, field if field.isidentifier() else "type")
    return path


def _readings(
    parts: Sequence[str | int], value: Any, is_missing: bool
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The paths that pydantic's path may mean, and the values at these paths; for a missing field, the value that lacks
    the field.

    The value's type, such as `text`, may also be the name of one of its fields. Then both are possible.
    """
    if not parts:
        yield (), value
        return
    part, *rest = parts
    is_index = isinstance(value, list) and isinstance(part, int)
    if is_index or (isinstance(value, dict) and part in value):
        yield from (((str(part), *path), found) for path, found in _readings(rest, value[part], is_missing))
        if is_index or value.get("type") != part:
            return
    elif is_missing and not rest:
        yield (str(part),), value
        return
    yield from _readings(rest, value, is_missing)


def _words(finding: dict[str, Any]) -> str:
    kind, value, context = finding["type"], finding["input"], dict(finding.get("ctx", {}))
    if kind == "union_tag_not_found":
        if not isinstance(value, dict):
            return WORDS["model_attributes_type"]
        if value.get("type") is not None:
            return f"must be a text, got {_shortened(value['type'])}"
    words = WORDS.get(kind)
    if words is None:
        return re.sub(r"^\w+ should ", "must ", str(finding["msg"])).replace("be False", "be false")
    if "tag" in context:
        context["tag"] = _cut(context["tag"])
    if kind in SIZE_FINDINGS and context["actual_length"] is None:
        context["actual_length"] = len(value)
    return words.format(**context)


def _shortened(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return _cut(repr(value[: MAX_VALUE_CHARACTERS + 1] if isinstance(value, str) else value))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}..."
