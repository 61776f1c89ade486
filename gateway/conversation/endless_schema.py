"""Finds a part of a JSON schema that no finite value matches, since the part needs itself."""

import json
from typing import Any

from baton.errors import InvalidRequest
from gateway.conversation.schema_parts import resolved

_WITH_PARTS = frozenset(
    {
        *("anyOf", "oneOf", "allOf", "$ref", "required", "minItems", "items", "prefixItems"),
        *("properties", "patternProperties", "additionalProperties", "minProperties"),
    }
)
"""A schema without any of these keywords has no parts."""


def check_ends(field: str, whose: str, schema: dict[str, Any]) -> None:
    """Raises InvalidRequest for `field` if a part of a schema needs itself: a model that begins this part never ends
    it."""
    if (part := endless_part(schema)) is not None:
        raise InvalidRequest(
            field,
            f"in {whose}, no finite value matches this part, because the part requires itself again: "
            f"{json.dumps(part)[:200]}; give the part an alternative, such as null",
        )


def endless_part(schema: dict[str, Any]) -> dict[str, Any] | None:
    """A part of the schema that only an endless value would match. Only parts that an answer may contain are searched.
    None: there is no such part.

    This is the search for unproductive symbols of a grammar (Hopcroft and Ullman, 1979, lemma 4.1): a part can end once
    all that it needs can end. Keywords whose effect is hard to follow count as parts that can end. The search is given
    up at a part with an `$id` of its own, since references within this part are relative to it.
    """
    parts: dict[int, Any] = {}
    num_missing: dict[int, int] = {}
    needed_by: dict[int, list[int]] = {}
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if id(part) in parts:
            continue
        if isinstance(part, dict) and "$id" in part and part is not schema:
            return None
        parts[id(part)] = part
        needs = _needs(part, schema)
        num_missing[id(part)] = min(len(needs), 1) if isinstance(part, list) else len(needs)
        for need in needs:
            needed_by.setdefault(id(need), []).append(id(part))
        waiting += [*needs, *_optional(part)]
    can_end = [key for key, missing in num_missing.items() if not missing]
    for key in can_end:  # the body appends to the list
        for above in needed_by.get(key, ()):
            num_missing[above] -= 1
            if not num_missing[above]:
                can_end.append(above)
    endless = parts.keys() - set(can_end)
    return next(
        (parts[key] for key in reversed(parts) if key in endless and isinstance(parts[key], dict)), None
    )


def _needs(part: Any, schema: dict[str, Any]) -> list[Any]:
    """The parts that a value of this part needs. A value needs all of them. Only if `part` is a list of alternatives,
    one is enough."""
    if isinstance(part, list):
        return part
    if not isinstance(part, dict) or _WITH_PARTS.isdisjoint(part):
        return []
    needs = [part[key] for key in ("anyOf", "oneOf") if key in part] + _list(part, "allOf")
    if (target := resolved(schema, part.get("$ref"))) is not None:
        needs.append(target)
    if part.get("type") == "object":
        properties, others = _map(part, "properties"), [*_map(part, "patternProperties").values()]
        if (rest := part.get("additionalProperties", True)) is not False:
            others.append(rest)
        needs += [properties.get(name, others) for name in _list(part, "required") if isinstance(name, str)]
        if isinstance(at_least := part.get("minProperties"), int) and at_least > 0:
            needs.append([*properties.values(), *others])
    elif part.get("type") == "array" and isinstance(at_least := part.get("minItems"), int):
        first = _list(part, "prefixItems")
        needs += first[: max(0, at_least)]
        if at_least > len(first):
            needs.append(part.get("items", True))
    return needs


def _optional(part: Any) -> list[Any]:
    """The parts that a value of this part may have."""
    if not isinstance(part, dict) or _WITH_PARTS.isdisjoint(part):
        return []
    if part.get("maxItems") == 0:
        part = part | {"items": True, "prefixItems": []}
    rest = [part[key] for key in ("items", "additionalProperties") if key in part]
    maps = (_map(part, key).values() for key in ("properties", "patternProperties"))
    return [*rest, *_list(part, "prefixItems"), *(value for values in maps for value in values)]


def _list(part: dict[str, Any], key: str) -> list[Any]:
    value = part.get(key)
    return value if isinstance(value, list) else []


def _map(part: dict[str, Any], key: str) -> dict[str, Any]:
    value = part.get(key)
    return value if isinstance(value, dict) else {}
