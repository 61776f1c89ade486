"""Describes a body's problem in the client's terms: from pydantic's findings to a field and its problem."""

import re
from collections.abc import Sequence
from typing import Any

MAX_VALUE_CHARACTERS = 60
"""An error message repeats at most so many characters of a wrong value, and of each key on the way to it."""

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


def first_problem(findings: Sequence[dict[str, Any]], body: Any) -> tuple[str, str]:
    """The field's dotted path in the body, and the problem.

    If a value may have several types, pydantic has a finding for each type. The findings with the longest
    path into the value are reported.
    """
    top = findings[0]["loc"][:2]
    placed = [(_place(finding, body), finding) for finding in findings if finding["loc"][:2] == top]
    furthest = max((place for place, _ in placed), key=len)
    there = [finding for place, finding in placed if place == furthest]
    problem = " or ".join(dict.fromkeys(_words(finding) for finding in there))
    if there[0]["type"] not in WORDS and isinstance(there[0]["input"], str | int | float):
        problem += f", got {_shortened(there[0]['input'])}"
    return ".".join(map(_cut, furthest)) or "body", problem


def _place(finding: dict[str, Any], body: Any) -> tuple[str, ...]:
    """The path to the value, without the type names that pydantic inserts."""
    if finding["type"] == "json_invalid":
        return ()
    root, *parts = finding["loc"]
    if root != "body":
        return tuple(str(part) for part in parts)  # the finding is about a header, or about the URL
    place: list[str] = []
    value = body
    for depth, part in enumerate(parts, 1):
        is_in = (
            part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        )
        if is_in:
            value = value[part]
        elif not (finding["type"] == "missing" and depth == len(parts)):
            continue
        place.append(str(part))
    if (
        finding["type"] in TAG_FINDINGS
        and (field := finding["ctx"]["discriminator"].strip("'")).isidentifier()
    ):
        place.append(field)
    return tuple(place)


def _words(finding: dict[str, Any]) -> str:
    words = WORDS.get(finding["type"])
    if words is None:
        return re.sub(r"^\w+ should ", "must ", str(finding["msg"])).replace("be False", "be false")
    context = finding.get("ctx", {})
    return words.format(**context | {"tag": _cut(context["tag"])} if "tag" in context else context)


def _shortened(value: str | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _cut(repr(value[: MAX_VALUE_CHARACTERS + 1] if isinstance(value, str) else value))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}..."
