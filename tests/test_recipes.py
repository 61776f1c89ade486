"""docs/recipes.md names every place to edit: its paths exist, and each example occurs in its recipe's places, and
nowhere else."""

import re
import subprocess

import pytest

from tests.test_architecture import PACKAGES, ROOT

PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPES = {
    title: body
    for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    if "\nFollow `" in body
}
GENERATED = ("baton/v1/", "gateway/grpc/generated/")
FILE_ENDS = (".py", ".proto", ".js", ".css", ".cpp", ".h", ".json", ".yaml", ".toml")


def example(body: str) -> str:
    """The recipe's example as a regular expression. The name of a counter in Prometheus is longer at both ends."""
    (line,) = re.findall(r"^Follow (`.*)", body, re.MULTILINE)
    names = "|".join(re.findall(r"`(\w+)`", line))
    return rf"\b(baton_)?({names})(_total)?\b"


def places(body: str) -> list[str]:
    """The paths that a numbered line begins with."""
    lines = re.findall(r"^\d+\. ((?:`[\w./-]+`(?:, )?)+)", body, re.MULTILINE)
    return [path for line in lines for path in re.findall(r"`([^`]+)`", line)]


def files_with(pattern: str) -> set[str]:
    """Tracked or new files of the product."""
    command = ["git", "grep", "--untracked", "-lE", pattern, "--", *PACKAGES]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    return {path for path in found if not path.startswith(GENERATED)}


def test_there_is_a_recipe_for_each_common_change() -> None:
    assert len(RECIPES) == 7


def test_every_name_exists() -> None:
    """Names of the code in backticks are words of its files, or of the file that they follow: `file.py` (`name`)."""
    in_files = re.findall(r"`([\w.-]+(?:/[\w.-]+)+)` \(((?:`[^`]+`(?:, )?)+)\)", PAGE)
    for path, names in in_files:
        text = (ROOT / path).read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            assert words(name) <= words(text), f"{path} has no {name}"
    named = {
        name for name in re.findall(r"`([A-Za-z_][\w.]*)`", PAGE) if not name.endswith((*FILE_ENDS, ".md"))
    }
    known = {word for path in tracked() for word in words((ROOT / path).read_text(errors="ignore"))}
    assert len(named) > 100
    assert [name for name in sorted(named) if not words(name) <= known] == []


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def tracked() -> list[str]:
    """Files in which a name counts as existing; files of prose are left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    return [path for path in paths if path.endswith(FILE_ENDS) and (ROOT / path).exists()]


def test_every_path_exists() -> None:
    named = {
        path for path in re.findall(r"`([\w.-]+(?:/[\w.-]+)+)`", PAGE) if not path.startswith("baton/v1")
    }
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("title", RECIPES)
def test_the_example_is_in_every_place(title: str) -> None:
    word = re.compile(example(RECIPES[title]))
    listed = places(RECIPES[title])
    assert [path for path in listed if not word.search((ROOT / path).read_text())] == []


@pytest.mark.parametrize("title", RECIPES)
def test_the_example_is_in_no_other_file_of_the_product(title: str) -> None:
    assert files_with(example(RECIPES[title])) - set(places(RECIPES[title])) == set()
