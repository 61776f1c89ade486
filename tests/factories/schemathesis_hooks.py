"""What schemathesis cannot know from a description: which model is served, and what a deadline means."""

from typing import Any

import schemathesis

from gateway.http.call import TIMEOUT_HEADER

MODEL = "tiny"
PATIENCE_MS = 60_000


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: Any, kwargs: dict[str, Any]) -> None:
    """Any text that stands for the model's name becomes that name, or every completion would end in a 404; and no
    deadline is one that a good request might miss, which would rightly be a 504."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body = case.body | {"model": MODEL}
    asked = (case.headers or {}).get(TIMEOUT_HEADER)
    if isinstance(asked, str) and asked.isdecimal() and 0 < int(asked) < PATIENCE_MS:
        case.headers[TIMEOUT_HEADER] = str(PATIENCE_MS)
