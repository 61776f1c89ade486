"""Refuses schemas that a grammar cannot express, although the compiler of grammars accepts them."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from baton.errors import InvalidRequest
from gateway.conversation.schema_parts import schemas_in

EXACT_BITS = 53
"""A grammar holds numbers as floats of 64 bits, so it cannot hold every integer that has more bits than this."""
LONG_NUMBER = re.compile(r"[0-9]{16}")
"""Only integers that have at least this many digits may have more bits."""

DRAFT_3 = {
    "required": "list the names of required properties in 'required' of their object",
    "divisibleBy": "use multipleOf",
    "extends": "use allOf",
    "disallow": "use not",
}
"""Keywords of draft 3 of JSON Schema, which the compiler ignores, and what newer drafts have in their place."""


def check_schema(field: str, whose: str, schema: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if `const` or `enum` lists an integer that a grammar would replace by another one, or if
    a keyword has a meaning only in draft 3 of JSON Schema."""
    is_draft_3 = "draft-03" in str(schema.get("$schema"))
    for part in schemas_in(schema):
        for key in ("const", "enum"):
            _check_listed(field, f"in {whose}, '{key}'", part.get(key))
        for key in DRAFT_3.keys() & part:
            if _is_of_draft_3(key, part[key], is_draft_3):
                raise InvalidRequest(
                    field,
                    f"in {whose}, '{key}' has the form of draft 3 of JSON Schema, which is not supported; "
                    f"{DRAFT_3[key]}",
                )


def _is_of_draft_3(key: str, value: Any, is_draft_3: bool) -> bool:
    """Whether a keyword of DRAFT_3 restricts values. `is_draft_3`: the schema says that it is of draft 3. In other
    schemas, `extends` and `disallow` may be anybody's own keywords."""
    if key == "required":
        return value is True
    return is_draft_3 or (key == "divisibleBy" and isinstance(value, int | float))


def _check_listed(field: str, where: str, listed: Any) -> None:
    values = [listed]
    for value in values:  # the body appends to the list
        if isinstance(value, list | Mapping):
            values += value.values() if isinstance(value, Mapping) else value
        elif isinstance(value, int) and not _is_exact(value):
            raise InvalidRequest(
                field,
                f"{where} lists the integer {str(value)[:60]}, which has more than {EXACT_BITS} bits and which a "
                "grammar cannot hold; list it as a string",
            )


def _is_exact(number: int) -> bool:
    """Whether llguidance holds this number. It writes floats of 2**63 or more with their shortest digits."""
    if abs(number) <= 2**EXACT_BITS:
        return True
    try:
        held = float(number)
    except OverflowError:
        return False
    return number == (int(held) if abs(number) < 2**63 else int(Decimal(repr(held))))
