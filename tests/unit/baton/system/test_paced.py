"""Progress as lines of a log."""

from baton.system.paced import EVERY_S, paced


def test_an_activity_is_said_at_once_and_then_every_few_seconds() -> None:
    lines: list[str] = []
    now = 100.0
    report = paced(lines.append, lambda: now)
    for text in ("downloading a: 1 of 9", "downloading a: 2 of 9", "downloading b: 1 of 5"):
        report(text, 0.1)
    assert lines == ["downloading a: 1 of 9", "downloading b: 1 of 5"]
    now += EVERY_S
    report("downloading a: 2 of 9", 0.2)
    report("downloading a: 3 of 9", 0.3)
    assert lines[2:] == ["downloading a: 2 of 9"]


def test_what_does_not_change_is_not_repeated() -> None:
    lines: list[str] = []
    now = 0.0
    report = paced(lines.append, lambda: now)
    for _ in range(3):
        report("waiting", 0.0)
        now += 2 * EVERY_S
    assert lines == ["waiting"]
