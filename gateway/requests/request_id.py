"""Request ids: what a request is called, so that it can stand in any log and header as it is."""

import re
import secrets

_WELL_FORMED = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
WELL_FORMED = "1 to 128 letters, digits, dots, colons, dashes and underscores"

_MAX_CHARACTERS = 128
_DRAWN_BYTES = 8
"""Behind an id that was offered; twice as many where there was none."""
_MAX_OFFERED = _MAX_CHARACTERS - 2 * _DRAWN_BYTES - len("-")


def is_well_formed(request_id: str) -> bool:
    return _WELL_FORMED.fullmatch(request_id) is not None


def offered_id(value: str | None) -> str | None:
    """What a client or proxy called its request in passing (`x-request-id`); None if that could not stand in a log."""
    return value if value is not None and is_well_formed(value) else None


def request_id_for(offered: str | None) -> str:
    """A name that no other request has. It begins with the one that was offered, so that a search for that finds it:
    several requests may come with the same, since proxies repeat theirs when they try again."""
    if offered is None:
        return secrets.token_hex(2 * _DRAWN_BYTES)
    return f"{offered[:_MAX_OFFERED]}-{secrets.token_hex(_DRAWN_BYTES)}"
