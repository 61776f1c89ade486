"""One holder at a time, and file systems without locks."""

import errno
import fcntl
import threading
from pathlib import Path

import pytest

from baton.system.file_lock import exclusive


def test_a_second_one_waits_and_says_so(tmp_path: Path) -> None:
    lock = tmp_path / "new" / "lock"
    is_waiting, order = threading.Event(), []

    def second() -> None:
        with exclusive(lock, is_waiting.set) as is_alone:
            order.append(("second", is_alone))

    with exclusive(lock, lambda: order.append(("waited", True))) as is_alone:
        thread = threading.Thread(target=second)
        thread.start()
        assert is_waiting.wait(60)
        order.append(("first", is_alone))
    thread.join(60)
    assert order == [("first", True), ("second", True)]


def test_without_locks_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with exclusive(tmp_path / "lock") as is_alone:
        assert not is_alone


def test_another_error_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="Input/output"), exclusive(tmp_path / "lock"):
        pass
