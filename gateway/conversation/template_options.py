"""Checks the variables that a client sets for a model's chat template.

There may be only a few, with plain values, and none that the gateway sets itself. This module does not check
whether a template reads a variable, or knows its value.
"""

import math
import re
from collections.abc import Mapping

from baton.errors import InvalidRequest
from gateway.conversation.template import RESERVED

TemplateValue = str | int | float | bool | None

MAX_OPTIONS = 32
MAX_OPTION_CHARACTERS = 1_024
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
RESERVED_ENDS = ("_token", "_tokens")
"""Ends of names of special tokens, such as `bos_token`. Clients may not set them."""


def check_template_options(field: str, options: Mapping[str, TemplateValue]) -> None:
    """Raises InvalidRequest for invalid options. It names `field`, the options' name in the caller's API, or
    `field.key`."""
    if len(options) > MAX_OPTIONS:
        raise InvalidRequest(field, f"must have at most {MAX_OPTIONS} entries, got {len(options)}")
    for key, value in options.items():
        if not NAME.fullmatch(key):
            raise InvalidRequest(field, f"{key[:60]!r} is no name of a template's variable")
        place = f"{field}.{key}"
        if key in RESERVED or key.endswith(RESERVED_ENDS):
            raise InvalidRequest(place, "is set by the gateway; use the request's own fields")
        if not isinstance(value, TemplateValue):
            raise InvalidRequest(place, "must be a string, a number, true, false or null")
        if isinstance(value, str) and len(value) > MAX_OPTION_CHARACTERS:
            raise InvalidRequest(
                place, f"must have at most {MAX_OPTION_CHARACTERS} characters, got {len(value)}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(place, "must be a finite number")
