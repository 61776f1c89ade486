"""tests/README.md names every folder of tests, every factory and every test at the root, and nothing that does not
exist."""

import re

from tests.test_architecture import ROOT

FOLDER = ROOT / "tests"
MAP = (FOLDER / "README.md").read_text()


def test_every_folder_is_in_the_map() -> None:
    named = re.findall(r"^\| `(\w+)/` \|", MAP, re.MULTILINE)
    there = [path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert sorted(named) == sorted(there)


def test_every_factory_is_in_the_map() -> None:
    rows = re.findall(r"^\|[^|]*\| ((?:`\w+\.py`(?:, )?)+) \|", MAP, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+\.py)`", row)]
    there = [path.name for path in (FOLDER / "factories").glob("*.py") if path.name != "__init__.py"]
    assert sorted(named) == sorted(there)


def test_every_test_at_the_root_is_in_the_map() -> None:
    named = re.findall(r"`(test_\w+\.py)`", MAP)
    assert sorted(named) == sorted(path.name for path in FOLDER.glob("test_*.py"))
