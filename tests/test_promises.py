"""docs/promises.md numbers what users may rely on; each number has tests named `test_cNN_…`, and each such test has a
number."""

import re
from collections import defaultdict

from tests.test_architecture import ROOT, modules, relative

PAGE = (ROOT / "docs" / "promises.md").read_text()
PROMISED = [int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)]


def test_numbers_are_given_once_and_in_order() -> None:
    assert sorted(set(PROMISED)) == PROMISED


def test_every_promise_has_its_tests_and_every_number_its_promise() -> None:
    tests: defaultdict[int, list[str]] = defaultdict(list)
    for file in modules("tests"):
        for name in re.findall(r"^ *(?:async )?def (test_c\d\w*)", file.read_text(), re.MULTILINE):
            found = re.match(r"test_c(\d\d)_", name)
            assert found, f"{name}: two digits, as test_c07_"
            tests[int(found[1])].append(f"{relative(file)}::{name}")
    promised = set(PROMISED)
    assert {number: tests[number] for number in tests.keys() - promised} == {}, (
        "in no line of docs/promises.md"
    )
    assert promised - tests.keys() == set(), "no test is named after these promises"


def test_docstrings_name_promises_that_exist() -> None:
    cited = {
        int(number)
        for file in modules("tests")
        for line in re.findall(r"[Bb]ehaviours? (\d[\d, to and]*)", file.read_text())
        for number in re.findall(r"\d+", line)
    }
    assert cited, "the word has changed"
    assert cited - set(PROMISED) == set()
