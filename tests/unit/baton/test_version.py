"""Baton's own version, installed or not."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import yaml

from baton.version import UNINSTALLED, baton_version

ROOT = Path(__file__).parents[3]


def test_is_that_of_the_package() -> None:
    assert baton_version() == version("baton")


def test_a_tree_that_is_not_installed_has_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> str:
        raise PackageNotFoundError("baton")

    monkeypatch.setattr("baton.version.version", absent)
    assert baton_version() == UNINSTALLED


def test_the_chart_and_the_tags_of_images_have_the_version_of_pyproject() -> None:
    """The chart's default for an image's tag begins with `appVersion`."""
    released = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((ROOT / "helm" / "baton" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (released, released)
    for file in ("Dockerfile", "docs/kubernetes.md"):
        tags = re.findall(r"baton:([\w.]+)-(?:cpu|cuda)\b", (ROOT / file).read_text())
        assert set(tags) == {released}, file
