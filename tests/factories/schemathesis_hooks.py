"""Facts that schemathesis cannot read in a description: which model is served, and what a deadline means."""

from typing import Any

import schemathesis

from gateway.http.call import TIMEOUT_HEADER

MODEL = "tiny"
PATIENCE_MS = 60_000


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: Any, kwargs: dict[str, Any]) -> None:
    """Changes a generated request so that a good request succeeds.

    Any text in place of the model's name becomes this name, since otherwise every completion would end with a
    404. A short deadline is extended, since a good request might miss it, and a 504 would be correct then.
    """
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body = case.body | {"model": MODEL}
    asked = (case.headers or {}).get(TIMEOUT_HEADER)
    if isinstance(asked, str) and asked.isdecimal() and 0 < int(asked) < PATIENCE_MS:
        case.headers[TIMEOUT_HEADER] = str(PATIENCE_MS)
