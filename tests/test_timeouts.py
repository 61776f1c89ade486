"""docs/timeouts.md lists every key of the configuration that is a time, and constants, each with its default."""

import importlib
import re
from typing import Any

import pytest

from baton.config import BatonConfig
from tests.test_architecture import ROOT

ROWS = re.findall(
    r"^\| `([\w.]+)` \| (\S+) \| [^|]+ \| [^|]+ \|$",
    (ROOT / "docs" / "timeouts.md").read_text(),
    re.MULTILINE,
)


def times_of_the_configuration() -> dict[str, Any]:
    config = BatonConfig()
    return {
        f"{section}.{key}": getattr(getattr(config, section), key)
        for section in BatonConfig.model_fields
        for key in type(getattr(config, section)).model_fields
        if key.endswith("_s")
    }


def test_every_time_of_the_configuration_is_there_once() -> None:
    listed = [name for name, _ in ROWS if not name.rpartition(".")[2].isupper()]
    times = set(times_of_the_configuration())
    assert not times - set(listed), "docs/timeouts.md lacks a key"
    assert not set(listed) - times, "docs/timeouts.md has a key that the configuration has not"
    assert len(listed) == len(times), "docs/timeouts.md has a key twice"


@pytest.mark.parametrize(("name", "default"), ROWS)
def test_defaults_are_those_of_the_code(name: str, default: str) -> None:
    if name in (times := times_of_the_configuration()):
        found = times[name]
    else:
        module, _, constant = name.rpartition(".")
        found = getattr(importlib.import_module(module), constant)
    assert found == (None if default == "none" else float(default))
