"""Users whom the password file does not know, and `~` in paths."""

import os
import pwd
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.system.home import ensure_home, expanded


def test_a_user_without_a_home_has_the_root_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    ensure_home(os.environ)
    assert Path.home() == Path("/somewhere")
    monkeypatch.delenv("HOME")
    ensure_home(os.environ)
    assert "HOME" not in os.environ  # the password file says it

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    ensure_home(os.environ)
    assert Path.home() == Path("/")


def test_a_path_of_an_unknown_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert expanded("~/x") == Path("/somewhere/x")
    assert expanded("x/~y") == Path("x/~y")
    with pytest.raises(ConfigError, match=r"^~no-such-user/x: there is no user of this name"):
        expanded("~no-such-user/x")
