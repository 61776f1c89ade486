"""A text stream without a tokenizer: every token counts, and none has any text."""

from collections.abc import Sequence

from gateway.text import TextStream


class SilentText(TextStream):
    def __init__(self) -> None:
        """Has nothing of a real one."""

    @property
    def matched_stop(self) -> str | None:
        return None

    def push(self, token_ids: Sequence[int]) -> tuple[int, str]:
        return len(token_ids), ""

    def flush(self) -> str:
        return ""
