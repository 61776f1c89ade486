"""paced: writes progress to a log. The first report of each activity is written, then one every few seconds."""

import time
from collections.abc import Callable

EVERY_S = 5.0
"""Pause between two lines about one activity."""


def paced(
    write: Callable[[str], None], now: Callable[[], float] = time.monotonic
) -> Callable[[str, float], None]:
    """A function for reports such as `downloading x: 3 of 9 MB`; text before the colon names the activity."""
    said: dict[str, tuple[str, float]] = {}

    def report(text: str, _fraction: float) -> None:
        what = text.partition(":")[0]
        last, said_at = said.get(what, ("", -EVERY_S))
        if text != last and (not last or now() - said_at >= EVERY_S):
            said[what] = text, now()
            write(text)

    return report
