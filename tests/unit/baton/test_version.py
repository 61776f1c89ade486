"""Baton's own version, installed or not."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from baton.version import UNINSTALLED, baton_version


def test_is_that_of_the_package() -> None:
    assert baton_version() == version("baton")


def test_a_tree_that_is_not_installed_has_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> str:
        raise PackageNotFoundError("baton")

    monkeypatch.setattr("baton.version.version", absent)
    assert baton_version() == UNINSTALLED
